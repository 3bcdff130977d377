"""Send random requests that the OpenAPI document allows, and check that none fails with a status of
500 or more."""

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from event_logs import begin, emit_steps, finished
from hypothesis import HealthCheck, Phase, given, settings
from panels import Served, serve_panel

#: Excluded are endless streams and requests that start processes or delete runs.
_EXCLUDED = r"/(stream|chat|start|stop|resume|export|plan|planner|preview|upload|record)$"


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("fuzz")
    finished(folder / "first")
    log = begin(folder / "second")
    emit_steps(log, 1, 40)
    with serve_panel(folder) as served:
        yield served


def operations(served: Served) -> list[Any]:
    """Return the operations of the server's OpenAPI document, without the excluded ones."""
    document = served.get("/api/openapi.json")
    ids = [run["id"] for run in served.get("/api/runs")["runs"]]
    for path in document["paths"].values():
        for operation in path.values():
            for parameter in operation.get("parameters", []):
                if parameter["name"] == "id":  # mostly existing runs, because other IDs fail early
                    parameter["schema"] = {"enum": [*ids, "000000000000", "../first"]}
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=str(served.client.base_url))
    schema = schema.exclude(path_regex=_EXCLUDED).exclude(method="DELETE")
    return [operation.ok() for operation in schema.get_all_operations()]


@pytest.mark.soak
def test_no_allowed_request_causes_a_server_error(served: Served) -> None:
    api_operations = operations(served)
    assert len(api_operations) > 12
    for operation in api_operations:

        @settings(
            max_examples=10, deadline=None, derandomize=True, database=None,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(case=operation.as_strategy())
        def check_case(case: schemathesis.Case) -> None:
            response = case.call(headers=served.with_token, timeout=20)
            assert response.status_code < 500, f"{case.as_curl_command()}\n{response.text}"
            if response.status_code >= 400:
                assert set(response.json()["error"]) >= {
                    "code",
                    "what",
                    "allowed",
                    "fix",
                    "values",
                }, response.text

        check_case()
