"""Schemathesis against the HTTP face of the rollout servers: ``make fuzz-http``.

It makes cases from the API's own OpenAPI: valid ones, and such as break it. None may be answered by
a 500.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import sys

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

from ray_apr.serve.ingress import make_api
from tests.fakes import OutsideClient

WANTED = 2_000
"""Cases, over all operations."""


def main() -> int:
    """Returns 1 if there was a server error, or too few cases."""
    api = make_api(OutsideClient(), token=None, max_model_len=512)
    schema = schemathesis.openapi.from_asgi("/openapi.json", api)
    operations = [found.ok() for found in schema.get_all_operations()]
    codes: collections.Counter[tuple[str, int]] = collections.Counter()
    failed: list[str] = []
    limits = settings(
        max_examples=-(-WANTED // len(operations)),
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
        database=None,
    )

    def check(case: schemathesis.Case) -> None:
        reply = case.call()
        codes[case.path, reply.status_code] += 1
        if reply.status_code >= 500:
            failed.append(f"{case.method} {case.path} {case.body!r}: {reply.status_code}")

    for operation, mode in itertools.product(operations, GenerationMode):
        cases = operation.as_strategy(generation_mode=mode)
        with contextlib.suppress(Unsatisfiable):  # nothing to break where nothing is taken
            limits(given(cases)(check))()
    for (path, code), count in sorted(codes.items()):
        print(f"{path:28} {code} {count:6}")
    print(f"{sum(codes.values())} cases, {len(failed)} server errors")
    print(*failed[:10], sep="\n")
    return int(bool(failed) or sum(codes.values()) < WANTED)


if __name__ == "__main__":
    sys.exit(main())
