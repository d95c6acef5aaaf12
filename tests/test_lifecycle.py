"""Requests to stop: where they raise, and that nothing in between can swallow them."""

import contextlib
import os
import signal

import pytest

from batchgen.errors import ConfigError, Interrupted
from batchgen.lifecycle import Stop


def test_a_request_raises_only_where_work_may_be_left():
    stop, went_on = Stop(), []

    def work():
        with stop.raising():
            stop.request("SIGTERM")
            went_on.append(True)

    with pytest.raises(Interrupted, match="stopped by SIGTERM"):
        work()
    assert not went_on
    later = Stop()
    with later.raising():
        pass
    later.request("SIGTERM")
    assert later.requested == "SIGTERM"
    with pytest.raises(Interrupted), later.raising():
        raise AssertionError("it began")


def test_the_first_reason_holds():
    stop = Stop()
    stop.request("the deadline")
    stop.request("SIGTERM")
    assert str(stop.interrupted()).startswith("stopped by the deadline")


def test_work_that_swallows_the_request_ends_with_it_all_the_same():
    stop, done = Stop(), []

    def swallow():
        with contextlib.suppress(Exception):
            stop.request("SIGTERM")
        done.append("the rest")

    with pytest.raises(Interrupted), stop.raising():
        swallow()
    assert done


def test_work_that_takes_the_request_for_an_error_of_its_own_ends_with_it_all_the_same():
    stop = Stop()

    def check():
        try:
            stop.request("SIGTERM")
        except Exception as e:
            raise ConfigError(f"job.yaml, line 10: {e}") from e

    with pytest.raises(Interrupted, match="stopped by SIGTERM"), stop.raising():
        check()


def test_errors_of_the_work_pass_where_nobody_asked_to_stop():
    with pytest.raises(ConfigError), Stop().raising():
        raise ConfigError("no such key")


def test_signals_are_caught_and_ignored_ones_stay_ignored():
    before = {one: signal.getsignal(one) for one in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGTERM)}
    before[signal.SIGINT] = signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        stop = Stop()
        stop.install()
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.requested is None
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.requested == "SIGUSR1"
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
