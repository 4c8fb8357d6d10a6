"""One fork server for all tests, whichever check comes first."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def judging_server():
    from pabench.runner.worker import start_server

    start_server(("kernel", "model"))
