"""A route of the texts of errors, notices and events in other languages."""

from fastapi import APIRouter

from paceline.messages.catalogue import chinese
from paceline.web.files import JSONObject

router = APIRouter()


@router.get("/api/messages/zh")
def messages() -> JSONObject:
    """Return the Chinese templates by code: ``{code: {what, allowed, fix}}``. Each is a text with
    fields such as ``{name}``, or a list, of which the first is used whose values are present."""
    return {code: dict(texts) for code, texts in chinese().items()}
