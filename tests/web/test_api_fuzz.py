"""The API as its own OpenAPI document describes it, with values that nobody thought of: never a
500."""

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from event_logs import begin, emit_steps, finished
from hypothesis import HealthCheck, Phase, given, settings
from panels import Served, serving

#: Streams do not end, and what starts processes is tried where it can be waited for.
_EXCLUDED = r"/(stream|chat|start|stop|resume|export|plan|preview|upload)$"


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("fuzz")
    finished(folder / "one")
    log = begin(folder / "two")
    emit_steps(log, 1, 40)
    with serving(folder) as served:
        yield served


def operations(served: Served) -> list[Any]:
    """Those of the server's own document, but for the ones apart."""
    document = served.get("/api/openapi.json")
    ids = [run["id"] for run in served.get("/api/runs")["runs"]]
    for path in document["paths"].values():
        for operation in path.values():
            for parameter in operation.get("parameters", []):
                if parameter["name"] == "id":  # mostly one that there is: others end soon
                    parameter["schema"] = {"enum": [*ids, "000000000000", "../one"]}
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=str(served.client.base_url))
    return [
        operation.ok() for operation in schema.exclude(path_regex=_EXCLUDED).get_all_operations()
    ]


@pytest.mark.soak
def test_no_request_that_the_document_allows_is_too_much(served: Served) -> None:
    api_operations = operations(served)
    assert len(api_operations) > 12
    for operation in api_operations:

        @settings(
            max_examples=10, deadline=None, derandomize=True, database=None,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(case=operation.as_strategy())
        def each(case: schemathesis.Case) -> None:
            answer = case.call(headers=served.with_token, timeout=20)
            assert answer.status_code < 500, f"{case.as_curl_command()}\n{answer.text}"
            if answer.status_code >= 400:
                assert set(answer.json()["error"]) >= {"what", "allowed", "fix"}, answer.text

        each()
