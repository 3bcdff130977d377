"""Test that signal handlers are installed only in the main thread and restored."""

import signal
import threading

from paceline.core.stop import StopFlag, handlers_restored


def test_other_threads_install_no_handler() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    installed: list[bool] = []
    thread = threading.Thread(target=lambda: installed.append(StopFlag().install(sigint=True)))
    thread.start()
    thread.join()
    assert installed == [False]
    assert [
        signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    ] == before


def test_main_thread_restores_its_handlers() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    stop = StopFlag()
    with handlers_restored():
        assert stop.install(sigint=True)
        signal.raise_signal(signal.SIGTERM)
    assert stop.signal == signal.SIGTERM
    assert [
        signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    ] == before
