"""Signal handlers of a run: who may install them, and what they leave behind."""

import signal
import threading

from paceline.core.stop import StopFlag, handlers_restored


def test_a_thread_beside_the_main_one_changes_no_handler() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    installed: list[bool] = []
    thread = threading.Thread(target=lambda: installed.append(StopFlag().install(sigint=True)))
    thread.start()
    thread.join()
    assert installed == [False]
    assert [
        signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    ] == before


def test_the_main_thread_gets_its_handlers_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    stop = StopFlag()
    with handlers_restored():
        assert stop.install(sigint=True)
        signal.raise_signal(signal.SIGTERM)
    assert stop.signal == signal.SIGTERM
    assert [
        signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    ] == before
