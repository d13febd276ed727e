"""CUDA_DEVICE_MAX_CONNECTIONS: set where communication is hidden, unless somebody has set it; a value that hurts is named."""

from __future__ import annotations

import pytest

from ottava.overlap.connections import VARIABLE, ask_for_connections, connections_advice


def test_many_queues_are_asked_for_unless_somebody_has_chosen() -> None:
    environment: dict[str, str] = {}
    ask_for_connections(environment)
    assert environment == {VARIABLE: "32"}
    environment[VARIABLE] = "1"
    ask_for_connections(environment)
    assert environment == {VARIABLE: "1"}


@pytest.mark.parametrize(("value", "sharded"), [(None, True), ("32", True), ("8", True), ("1", False)])
def test_nothing_is_said_of_a_value_that_does_not_hurt(value: str | None, sharded: bool) -> None:
    assert connections_advice({} if value is None else {VARIABLE: value}, sharded) is None


def test_one_queue_beside_fsdp_is_named_with_its_remedy() -> None:
    said = connections_advice({VARIABLE: "1"}, sharded=True)
    assert said is not None and "one queue" in said and "unset it, or set it to 32" in said
    assert "4 queues" in str(connections_advice({VARIABLE: "4"}, sharded=True))


@pytest.mark.parametrize("value", ["0", "64", "many"])
def test_a_value_that_cuda_does_not_take_is_named(value: str) -> None:
    assert "is not a number from 1 to 32" in str(connections_advice({VARIABLE: value}, sharded=False))
