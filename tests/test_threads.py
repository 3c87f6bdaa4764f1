"""Threads that plain hooks run in: one for every call at once, used again, gone when nobody needs them."""

from __future__ import annotations

import threading
import time

import pytest
from rz_agent.envs import threads as module
from rz_agent.envs.threads import Threads


def test_a_free_thread_is_used_again() -> None:
    threads = Threads()
    first = threads.started(threading.get_ident).result(20)
    deadline = time.monotonic() + 20
    while threads.started(threading.get_ident).result(20) != first:  # it may have been on its way back
        assert time.monotonic() < deadline


def test_calls_that_hang_hold_up_no_other_call() -> None:
    threads, opened = Threads(), threading.Event()
    hanging = [threads.started(opened.wait) for _ in range(50)]
    try:
        assert threads.started(lambda: "answered").result(20) == "answered"
        assert not any(one.done() for one in hanging)
    finally:
        opened.set()
    assert all(one.result(20) for one in hanging)


def test_a_thread_that_stays_free_ends_and_a_later_call_gets_a_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "FREE_S", 0.05)
    threads = Threads()
    first = threads.started(threading.current_thread).result(20)
    first.join(20)
    assert not first.is_alive()
    assert threads.started(threading.current_thread).result(20) is not first
