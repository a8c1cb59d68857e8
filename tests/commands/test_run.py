"""`geotrain run` with children that are small scripts.

Everything inherits the driver's stdout, so reading that to its end proves that no process is left.
"""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest

DEADLINE_S = 30
# Scripts wait for blocked signals: one that comes just before `pause` would wait for the next.
DAEMON = """
    import signal
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    print("daemon: ready", flush=True)
    signal.sigwait([signal.SIGTERM])
    print("daemon: ended", flush=True)
"""
SITE = """
version = 1
[run]
id = "r"
global_batch = 8
regions = [{ name = "virginia", layers = "0:2" }]
[site]
name = "virginia"
"""
DRIVER = """
import sys
from geotrain.commands.run import run
from geotrain.config import load_config

site, daemon, *command = sys.argv[1:]
sys.exit(run(load_config(site), command, daemon_argv=[sys.executable, "-c", daemon]))
"""


class Driver:
    """`geotrain run` in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def read_until(self, line: str) -> None:
        assert self.process.stdout is not None
        for got in self.process.stdout:
            if got.strip() == line:
                return
        pytest.fail(f"ended without saying {line!r}: {self.finish()}")

    def finish(self) -> tuple[int, str, str]:
        """Exit status, the rest of stdout and stderr, once every process is gone."""
        out, err = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, out, err


@pytest.fixture
def start(tmp_path) -> Iterator[object]:
    site = tmp_path / "site.toml"
    site.write_text(SITE)
    processes = []

    def start(*command: str, daemon: str = DAEMON) -> Driver:
        process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(site), textwrap.dedent(daemon), *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # Unbuffered, a line and its end are two writes, and two processes' lines would mix.
            env={name: v for name, v in os.environ.items() if name != "PYTHONUNBUFFERED"},
        )
        processes.append(process)
        return Driver(process)

    yield start
    for process in processes:
        process.kill()
        process.communicate(timeout=DEADLINE_S)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(code)]


def test_exit_status_is_the_commands(start):
    status, out, err = start(*python("import sys; sys.exit(7)")).finish()
    assert status == 7
    assert err.startswith("geotrain run: ") and err.endswith(" ended with exit status 7\n")
    assert "daemon: ready" not in out or "daemon: ended" in out


def test_death_by_a_signal_is_told_as_a_shell_does(start):
    command = python("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    status, _, err = start(*command).finish()
    assert status == 128 + signal.SIGKILL
    assert err.startswith("geotrain run: ") and err.endswith(" was ended by SIGKILL\n")


def test_both_find_the_config_in_the_environment(start, tmp_path):
    show = 'import os; print(os.environ["GEOTRAIN_CONFIG"], flush=True)\n'
    _, out, _ = start(*python(show), daemon=show + textwrap.dedent(DAEMON)).finish()
    assert str(tmp_path / "site.toml") in out.splitlines()


ONCE = """
    import os, signal, sys
    from pathlib import Path
    mark = Path(os.environ["GEOTRAIN_CONFIG"]).with_name("killed")
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_daemon_that_is_killed_is_started_again_and_the_command_goes_on(start, tmp_path):
    go_on = tmp_path / "go on"
    command = f"""
        import pathlib, time
        while not pathlib.Path({str(go_on)!r}).exists():
            time.sleep(0.01)
        print("command: done", flush=True)
    """
    driver = start(*python(command), daemon=ONCE + DAEMON)
    driver.read_until("daemon: ready")
    go_on.touch()
    status, out, err = driver.finish()
    assert (status, out) == (0, "command: done\ndaemon: ended\n")
    assert "the daemon was ended by SIGKILL; starting it again" in err


def test_a_daemon_that_is_killed_again_and_again_takes_the_command_along(start):
    daemon = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    status, _, err = start(*python("import signal; signal.pause()"), daemon=daemon).finish()
    assert status == 1
    assert err.count("starting it again") == 5
    assert "the daemon ended first (exit status 137), so the command was ended" in err


def test_a_daemon_that_ends_first_takes_the_command_along(start):
    driver = start(*python("import signal; signal.pause()"), daemon="import sys; sys.exit(3)")
    status, _, err = driver.finish()
    assert status == 1
    assert err == (
        "geotrain run: the daemon ended first (exit status 3), so the command was ended\n"
    )


def test_under_nohup_a_closed_terminal_ends_nothing(start, tmp_path):
    go_on = tmp_path / "go on"
    command = f"""
        import pathlib, time
        print("command: ready", flush=True)
        while not pathlib.Path({str(go_on)!r}).exists():
            time.sleep(0.01)
    """
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # inherited, as nohup does it
    try:
        driver = start(*python(command))
    finally:
        signal.signal(signal.SIGHUP, before)
    driver.read_until("command: ready")
    driver.process.send_signal(signal.SIGHUP)
    go_on.touch()
    assert driver.finish()[0] == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_reach_the_command_which_ends_in_its_own_way(start, number):
    driver = start(
        *python(f"""
            import signal, sys
            signal.pthread_sigmask(signal.SIG_BLOCK, [{int(number)}])
            print("command: ready", flush=True)
            signal.sigwait([{int(number)}])
            sys.exit(5)
        """)
    )
    driver.read_until("command: ready")
    driver.process.send_signal(number)
    status, _, err = driver.finish()
    assert (status, err) == (5, "")


def test_a_second_signal_kills_a_command_that_ignores_the_first(start):
    driver = start(
        *python("""
            import signal
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            print("command: ready", flush=True)
            while signal.sigwait([signal.SIGINT]):
                print("command: no", flush=True)
        """)
    )
    driver.read_until("command: ready")
    driver.process.send_signal(signal.SIGINT)
    driver.read_until("command: no")
    driver.process.send_signal(signal.SIGINT)
    assert driver.finish()[0] == 128 + signal.SIGKILL


def test_what_the_command_left_running_ends_with_it(start):
    driver = start(
        *python("""
            import signal, subprocess, sys
            subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
            sys.exit(4)
        """)
    )
    assert driver.finish()[0] == 4


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_children_end_when_the_parent_is_killed(start):
    driver = start(*python("import signal; print('command: ready', flush=True); signal.pause()"))
    driver.read_until("command: ready")
    driver.process.kill()
    assert driver.finish()[0] == -signal.SIGKILL


def test_a_command_that_cannot_start_is_one_line(start):
    status, _, err = start("/nonexistent/torchrun").finish()
    assert status == 127
    assert err == "geotrain run: cannot start /nonexistent/torchrun: No such file or directory\n"


ATTACH = """
    import os, sys
    from geotrain.config import load_config
    from geotrain.transport.attachment import Attachment
    from geotrain.version import __version__

    config = load_config(os.environ["GEOTRAIN_CONFIG"])
    attachment = Attachment.connect(
        config.socket_path,
        run_hash=config.run.hash,
        version=__version__,
        region="virginia",
        rank=0,
        world_size=1,
        arena_bytes=1 << 20,
        streams_in=[],
        streams_out=[],
        timeout_s=20,
    )
    if "fail" in sys.argv:
        raise ValueError("boom")
    attachment.close()
    sys.exit(9)
"""


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [((), 9, "its training process is done"), (("fail",), 1, "its training process failed")],
    ids=["done", "failed"],
)
def test_real_daemon_serves_the_command_and_leaves_no_file(tmp_path, arguments, status, words):
    site = tmp_path / "live.toml"
    addresses = 'listen = "127.0.0.1:0"\nstatus = "127.0.0.1:0"\n'
    site.write_text(SITE + f'socket = "{tmp_path}/rank.sock"\n' + addresses)
    run = [sys.executable, "-m", "geotrain", "run", "--config", str(site), "--"]
    process = subprocess.run(
        [*run, *python(ATTACH), *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert process.returncode == status, process.stderr
    assert f" ended with exit status {status}\n" in process.stderr
    assert "listens on 127.0.0.1:" in process.stderr
    # The end that is meant to come does not read like a failure.
    assert process.stderr.endswith(f"= the daemon ends: {words}\n")
    assert "SIGTERM" not in process.stderr
    assert not list(tmp_path.glob("rank.sock*"))
