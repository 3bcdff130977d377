"""Run `paceline VERB ...` in processes forked from a server that has imported torch and Paceline.

A short run spends most of its time on imports, in the command and again in the fork server of its
ranks. Here both are forked from a server that has already imported the modules. Everything else is
as with `python -m paceline`: a separate process with its own arguments, environment, working
folder, streams, signals and ranks.
"""

import contextlib
import importlib
import importlib.util
import json
import multiprocessing.util
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NoReturn

_PRELOADED = (
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.optimization",
    "peft",
    "paceline.commands.data",
    "paceline.commands.generate",
    "paceline.commands.plan",
    "paceline.commands.sft",
    "paceline.commands.verify",
    "paceline.launch.ranks.worker",
    "paceline.strategies.ddp.strategy",
    "paceline.tasks.classify",
    "paceline.verify.worker",
)
_MAX_REQUEST_BYTES = 1 << 20
# Above the file descriptors that a command opens.
_FIRST_HIGH_FD = 800
_RESET_SIGNALS = (signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Command:
    """A command started by the server, with the interface of :class:`subprocess.Popen`."""

    def __init__(
        self, args: list[str], stdout: IO[str], stderr: IO[str], status: IO[str], pid: int
    ) -> None:
        self.args, self.stdout, self.stderr, self.pid = args, stdout, stderr, pid
        self.returncode: int | None = None
        self._status = status
        self._outputs: dict[str, str] = {}
        self._readers: list[threading.Thread] = []

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self._read_status()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self._read_status()
        assert self.returncode is not None
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self._readers:
            self._readers = [
                threading.Thread(target=self._read, args=(name,), daemon=True)
                for name in ("stdout", "stderr")
            ]
            for reader in self._readers:
                reader.start()
        for reader in self._readers:
            reader.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        self.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return self._outputs["stdout"], self._outputs["stderr"]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> "Command":
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()
        self.stdout.close()
        self.stderr.close()

    def _read(self, name: str) -> None:
        stream = getattr(self, name)
        self._outputs[name] = "" if stream.closed else stream.read()
        stream.close()

    def _read_status(self) -> None:
        self.returncode = int(self._status.readline())
        self._status.close()


class CommandServer:
    """Client of the server. Each process that runs tests starts one server when it needs it.

    ``variables`` are environment variables of the server, in addition to those of this process.
    """

    def __init__(self, variables: Mapping[str, str] | None = None) -> None:
        self._variables = dict(variables or {})
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._environment: dict[str, str] = {}
        self._lock = threading.Lock()

    def can_run(self, environment: Mapping[str, str]) -> bool:
        """Return whether the command may run in the server: not if a variable differs that
        libraries may read at import."""
        with self._lock:
            server = self._environment if self._is_running() else os.environ | self._variables
        return all(
            name.startswith(("PACELINE_", "PYTEST_", "NO_COLOR", "COLUMNS", "OMP_NUM_THREADS"))
            or server.get(name) == environment.get(name)
            for name in server.keys() | environment.keys()
        )

    def start(
        self, args: list[str], environment: Mapping[str, str], cwd: Path, new_session: bool
    ) -> Command:
        """Start `paceline ARGS`."""
        request = {
            "args": args,
            "environment": dict(environment),
            "cwd": str(cwd),
            "new_session": new_session,
        }
        with contextlib.ExitStack() as stack:
            pipes = [os.pipe() for _ in range(3)]
            for _, write_end in pipes:
                stack.callback(os.close, write_end)
            with self._lock:
                self._ensure_running()
                assert self._socket is not None
                message = json.dumps(request).encode()
                socket.send_fds(self._socket, [message], [pipe[1] for pipe in pipes])
        stdout, stderr, status = (os.fdopen(pipe[0], encoding="utf-8") for pipe in pipes)
        pid = int(status.readline())
        return Command([sys.executable, "-m", "paceline", *args], stdout, stderr, status, pid)

    def _is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _ensure_running(self) -> None:
        if self._is_running():
            return
        client, server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (client, server):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MAX_REQUEST_BYTES)
        self._environment = os.environ | self._variables
        with server:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(server.fileno())],
                pass_fds=[server.fileno()],
                stdin=subprocess.DEVNULL,
                env=self._environment,
            )
        self._socket = client


#: The servers of this process. Tests that need another environment add one.
SERVERS = [CommandServer()]


def serve(control: socket.socket) -> None:
    """Start the requested commands until the client exits; send each command's PID and exit
    code."""
    wakeup, wakeup_writer = socket.socketpair()
    wakeup_writer.setblocking(False)
    signal.set_wakeup_fd(wakeup_writer.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # pytest handles Ctrl-C
    status_pipes: dict[int, int] = {}
    server_files = [control, wakeup, wakeup_writer]
    while True:
        ready, _, _ = select.select([control, wakeup], [], [])
        if wakeup in ready:
            wakeup.recv(4096)
            for pid, status in _reap_children():
                if pid in status_pipes:
                    _write_line(status_pipes.pop(pid), os.waitstatus_to_exitcode(status))
        if control in ready:
            message, files, _, _ = socket.recv_fds(control, _MAX_REQUEST_BYTES, 3)
            if not message:
                return
            stdout, stderr, status_pipe = files
            pid = os.fork()
            if pid == 0:
                for file in server_files:
                    file.close()
                for number in (*status_pipes.values(), status_pipe):
                    os.close(number)
                _run_command(json.loads(message), stdout, stderr)
            os.close(stdout)
            os.close(stderr)
            os.write(status_pipe, f"{pid}\n".encode())
            status_pipes[pid] = status_pipe


def _reap_children() -> Iterator[tuple[int, int]]:
    """Yield (PID, wait status) of each child that has exited."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            yield pid, status


def _write_line(pipe: int, value: int) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(pipe, f"{value}\n".encode())
    os.close(pipe)


def _run_command(request: dict[str, Any], stdout: int, stderr: int) -> NoReturn:
    """Run the command in a process that has just been forked."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in _RESET_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if request["new_session"]:
            os.setsid()
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["environment"])
        for target, source in ((1, stdout), (2, stderr)):
            os.dup2(source, target)
            os.close(source)
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
        sys.stderr = os.fdopen(
            2, "w", encoding="utf-8", closefd=False, buffering=1, errors="backslashreplace"
        )
        sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr
        sys.argv = ["paceline", *request["args"]]
        sys.path.insert(0, request["cwd"])
        if "OMP_NUM_THREADS" in os.environ:  # OpenMP reads it only when torch is imported
            import torch

            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        _become_main("paceline.__main__")
        _prefork_fork_server()
        from paceline.cli import entry

        entry()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _become_main(name: str | None) -> None:
    """Replace `__main__` as `python -m NAME` would; None: as `python -c` would."""
    main = types.ModuleType("__main__")
    if name is not None:
        main.__spec__ = importlib.util.find_spec(name)
        assert main.__spec__ is not None
        main.__file__ = main.__spec__.origin
    sys.modules["__main__"] = main


def _prefork_fork_server() -> None:
    """Fork a process that becomes multiprocessing's fork server when the command starts one.

    It is forked before the command has threads, loggers or connections, so that its state is that
    of a new interpreter.
    """
    command_end, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        command_end.close()
        _become_fork_server(server_end)
    server_end.close()
    connections: list[socket.socket] = [command_end]
    spawn = multiprocessing.util.spawnv_passfds

    def start(path: Any, args: list[Any], passfds: list[int]) -> int:
        is_server = "multiprocessing.forkserver import main" in str(args[-1])
        # torch reads this variable when it is imported, which has happened here.
        if not connections or not is_server or "TORCH_CPP_LOG_LEVEL" in os.environ:
            return spawn(path, args, passfds)
        # An exec would keep the environment and the set of ignored signals.
        ignored = [
            int(number)
            for number in (*_RESET_SIGNALS, signal.SIGINT)
            if signal.getsignal(number) == signal.SIG_IGN
        ]
        request = {
            "code": args[-1],
            "environment": dict(os.environ),
            "ignored": ignored,
            "files": list(passfds),
            "cwd": str(Path.cwd()),
        }
        with connections.pop() as connection:
            files = [0, 1, 2, *passfds]
            socket.send_fds(connection, [json.dumps(request).encode()], files)
        return pid

    multiprocessing.util.spawnv_passfds = start


def _become_fork_server(connection: socket.socket) -> NoReturn:
    import fcntl

    code = 1
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        descriptor = fcntl.fcntl(connection.detach(), fcntl.F_DUPFD_CLOEXEC, _FIRST_HIGH_FD)
        with socket.socket(fileno=descriptor) as moved:
            message, files, _, _ = socket.recv_fds(moved, _MAX_REQUEST_BYTES, 16)
        if not message:
            os._exit(0)  # the command has exited without starting a fork server
        request = json.loads(message)
        high_fds = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _FIRST_HIGH_FD) for file in files]
        for file in files:
            os.close(file)
        for source, target in zip(high_fds, [0, 1, 2, *request["files"]], strict=True):
            os.dup2(source, target)
            os.close(source)
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["environment"])
        for number in (*_RESET_SIGNALS, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in request["ignored"]:
            signal.signal(number, signal.SIG_IGN)
        sys.argv = ["-c"]
        _become_main(None)
        exec(request["code"], vars(sys.modules["__main__"]))
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


if __name__ == "__main__":
    sys.path.pop(0)  # the folder of the tests, which `python -m paceline` does not add
    for module_name in _PRELOADED:
        importlib.import_module(module_name)
    serve(socket.socket(fileno=int(sys.argv[1])))
