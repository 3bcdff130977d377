"""A route of the texts of errors, notices and events in other languages."""

from fastapi import APIRouter

from paceline.messages.catalogue import chinese

router = APIRouter()


@router.get("/api/messages/zh")
def messages() -> dict[str, dict[str, str | list[str]]]:
    """Return the Chinese templates by code: ``{code: {what, allowed, fix}}``. Each is a text with
    fields such as ``{name}``, or a list: the first one whose values are present is used."""
    return chinese()
