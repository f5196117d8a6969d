"""Escapes from the sandbox, tried; limits; and systems on which it refuses to start."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from sfumato.errors import ConfigError
from sfumato.sandbox import kernel
from sfumato.sandbox.sandbox import PYTHON, ProgramLimits, Sandbox, SandboxError

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def sandbox():
    try:
        made = Sandbox(ProgramLimits(wall_s=20, memory_mib=256, num_processes=16, disk_mib=8, output_kib=64))
        made.check()
    except SandboxError as error:
        pytest.skip(f"programs cannot be contained here: {error}")
    return made


def with_limits(**changes):
    return Sandbox(ProgramLimits(**{"wall_s": 20, "memory_mib": 256, "num_processes": 16, "disk_mib": 8, **changes}))


ATTEMPT = """
import ctypes, errno, os, signal, socket, struct, subprocess, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def call(*arguments):
    ctypes.set_errno(0)
    return libc.syscall(*arguments)
"""

ATTEMPTS = {  # each prints ESCAPED, or ends without a word, when it gets what it wants
    "write to the root": "open('/file', 'w')",
    "write to /etc": "open('/etc/file', 'w')",
    "write to /usr": "open('/usr/file', 'w')",
    "write to the interpreter": "open(os.path.join(os.path.dirname(os.__file__), 'os.py'), 'a')",
    "read /etc/shadow": "open('/etc/shadow').read()",
    "read /etc/passwd": "open('/etc/passwd').read()",
    "read /root": "os.listdir('/root/.ssh')",
    "list homes": "os.listdir('/home')",
    "environment of process 1": "open('/proc/1/environ', 'rb').read()",
    "memory of process 1": "open('/proc/1/mem', 'rb').read(1)",
    "descriptors of process 1": "os.listdir('/proc/1/fd')",
    "root of process 1": "os.listdir('/proc/1/root')",
    "network socket": "socket.socket(socket.AF_INET)",
    "network socket 6": "socket.socket(socket.AF_INET6)",
    "datagram socket": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
    "netlink socket": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "socket of the hypervisor": "socket.socket(40, socket.SOCK_STREAM)",
    "packet socket": "socket.socket(17, socket.SOCK_RAW)",
    "kernel's crypto socket": "socket.socket(38, socket.SOCK_SEQPACKET)",
    "mount": "assert call(165, b'none', b'/tmp', b'tmpfs', 0, None) == 0",
    "remount writable": "assert call(165, None, b'/', None, 4096 | 32, None) == 0",
    "mount by the new calls": "assert call(430, b'tmpfs', 0) >= 0",
    "a mount by the newest calls": "assert call(467, -100, b'/', 1, bytes(32), 32) >= 0",
    "a list of mounts": "assert call(458, bytes(24), ctypes.create_string_buffer(800), 100, 0) >= 0",
    "its input, opened again": "os.write(os.open('/proc/self/fd/0', os.O_WRONLY), b'x')",
    "its input, opened again to grow": "os.truncate('/proc/self/fd/0', 2 ** 30)",
    "its input, with other rights": "os.chmod('/proc/self/fd/0', 0o666); os.write(os.open('/proc/self/fd/0', 2), b'x')",
    "unmount": "assert call(166, b'/proc', 2) == 0",
    "new user namespace": "assert call(272, 0x10000000) == 0",
    "new user namespace by clone": "if not (pid := call(56, 0x10000011, 0, 0, 0, 0)): os._exit(0)\nassert pid > 0",
    "clone3": "assert call(435, bytes(88), 88) >= 0",
    "another's namespace": "assert call(308, os.open('/proc/self/ns/net', 0), 0) == 0",
    "chroot": "os.chroot('/tmp')",
    "pivot_root": "assert call(155, b'/tmp', b'/tmp') == 0",
    "trace process 1": "assert call(101, 16, 1, 0, 0) == 0",
    "trace itself": "assert call(101, 0, 0, 0, 0) == 0",
    "read the memory of a process": "assert call(310, 1, 0, 0, 0, 0, 0) == 0",
    "descriptor of another process": "assert call(438, os.pidfd_open(1), 0, 0) >= 0",
    "become root": "os.setuid(0)",
    "become another": "os.setresuid(0, 0, 0)",
    "become another group": "os.setgroups([0])",
    "set-user-id program": "open('/tmp/x', 'w'); os.chmod('/tmp/x', 0o6755); os.chown('/tmp/x', 0, 0)",
    "su": "subprocess.run(['/bin/su', '-c', 'true'], check=True, stdin=subprocess.DEVNULL, capture_output=True)",
    "physical memory": "open('/dev/mem', 'rb')",
    "kernel's memory": "open('/proc/kcore', 'rb')",
    "make a device": "os.mknod('/tmp/mem', 0o20666, os.makedev(1, 1))",
    "disks": "open('/dev/vda', 'rb')",
    "load a module": "assert call(313, os.open('/tmp/main.py', 0), b'', 0) == 0",
    "kernel's log": "assert call(103, 3, ctypes.create_string_buffer(100), 100) >= 0",
    "bpf": "assert call(321, 0, bytes(128), 128) >= 0",
    "perf events": "assert call(298, bytes(128), 0, -1, -1, 0) >= 0",
    "io_uring": "assert call(425, 4, bytes(128)) >= 0",
    "keys": "assert call(250, 0, -3, 0) >= 0",
    "userfaultfd": "assert call(323, 0) >= 0",
    "file handles": "assert call(304, -100, bytes(16), 0) >= 0",
    "fanotify": "assert call(300, 0, 0) >= 0",
    "shared memory of System V": "assert call(29, 0, 1 << 20, 0o1600) >= 0",
    "memory without a file": "os.memfd_create('x')",
    "reboot": "assert call(169, 0xfee1dead, 672274793, 0, 0) == 0",
    "set the clock": "time.clock_settime(time.CLOCK_REALTIME, 0)",
    "host name": "socket.sethostname('x')",
    "core pattern": "open('/proc/sys/kernel/core_pattern', 'w')",
    "trigger of the kernel": "open('/proc/sysrq-trigger', 'w')",
    "raise its limits": "import resource; resource.setrlimit(resource.RLIMIT_NPROC, (9999, 9999))",
    "raise its priority": "os.nice(-5)",
    "realtime": "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))",
    "cgroups": "os.listdir('/sys/fs/cgroup')",
    "link out of /tmp": "os.symlink('/etc/shadow', '/tmp/link'); open('/tmp/link').read()",
    "upwards": "open('/tmp/../../../../../root/.bashrc').read()",
    "own program": "open('/proc/self/exe', 'wb')",
    "other processes": "assert {name for name in os.listdir('/proc') if name.isdigit()} - {'1', str(os.getpid())}",
    "descriptors that were left open": "assert [n for n in range(3, 4096) if os.path.exists(f'/proc/self/fd/{n}')]",
    "terminal": "open('/dev/tty')",
}  # fmt: skip


@pytest.mark.parametrize("what", ATTEMPTS)
def test_an_escape_is_refused(sandbox, what):
    body = "\n".join(f"    {line}" for line in ATTEMPTS[what].splitlines())
    source = f"{ATTEMPT}try:\n{body}\nexcept BaseException as error:\n    print('refused', type(error).__name__)\n"
    source += "else:\n    print('ESCAPED')\n"
    finished = sandbox.run_python(source)
    text = finished.stdout.decode()
    assert text.startswith("refused ") and "NameError" not in text and "SyntaxError" not in text, finished


def test_what_was_tried_works_outside():
    """So that the attempts are refused by the sandbox, and not because they are written wrongly."""
    source = (
        ATTEMPT + "socket.socket(socket.AF_INET); open('/etc/passwd').read(); assert os.pidfd_open(os.getpid()) > 0\n"
    )
    source += "os.memfd_create('x'); assert call(430, b'tmpfs', 0) >= -1; assert [e for e in os.listdir('/proc')]"
    subprocess.run([sys.executable, "-c", source], check=True)


def test_the_environment_and_the_files_of_the_run_are_not_visible(sandbox, tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "swordfish")
    (tmp_path / "secret").write_text("swordfish")
    source = f"import os\nprint(dict(os.environ), os.path.exists({str(tmp_path)!r}), os.path.exists({str(ROOT)!r}))"
    output = sandbox.run_python(source).stdout.decode()
    assert "swordfish" not in output and output.endswith("False False\n") and "'HOME': '/tmp'" in output


def test_files_that_are_shown_can_be_read_and_not_written(tmp_path):
    (tmp_path / "data").write_text("shown")
    tmp_path.chmod(0o755)
    source = f"print(open({str(tmp_path / 'data')!r}).read())\nopen({str(tmp_path / 'data')!r}, 'w')"
    finished = Sandbox(readable=[str(tmp_path)]).run_python(source)
    assert finished.stdout == b"shown\n" and b"Read-only file system" in finished.stderr
    assert (tmp_path / "data").read_text() == "shown"


def test_sockets_of_the_machine_are_out_of_reach(sandbox, tmp_path):
    name = f"\0sfumato-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as abstract, socket.socket(socket.AF_UNIX) as filed:
        abstract.bind(name)
        abstract.listen()
        filed.bind(str(tmp_path / "socket"))
        filed.listen()
        for address in (name, str(tmp_path / "socket")):
            source = f"import socket\nsocket.socket(socket.AF_UNIX).connect({address!r})"
            assert not sandbox.run_python(source).is_success
            subprocess.run([sys.executable, "-c", source], check=True)  # outside it can be reached


def test_signals_reach_nobody_else(sandbox):
    came = []
    before = signal.signal(signal.SIGUSR1, lambda *_: came.append(1))
    try:
        source = "import os, signal\nfor pid in (1, -1, os.getppid()):\n"
        source += "    for number in (signal.SIGUSR1, signal.SIGKILL):\n"
        source += f"        try: os.kill(pid, number)\n        except OSError: pass\ntry: os.kill({os.getpid()}, 9)\n"
        source += "except ProcessLookupError: print('not there')"
        finished = sandbox.run_python(source)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert finished.stdout == b"not there\n" and not came and finished.exit_code == 0


# What would exhaust the machine


def test_a_fork_bomb_is_held_at_its_limit_and_ended():
    source = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    started = time.monotonic()
    finished = with_limits(wall_s=1.5).run_python(source)
    assert finished.why == "time" and time.monotonic() - started < 15
    counting = (
        "import os, time\nn = 0\nwhile True:\n    try:\n        if not os.fork(): time.sleep(60)\n        n += 1\n"
    )
    counting += "    except BlockingIOError: break\nprint(n)"
    assert with_limits().run_python(counting).stdout == b"15\n"


def test_a_bomb_of_threads_is_held_at_its_limit():
    source = "import threading, time\nn = 0\ntry:\n    while True:\n"
    source += "        threading.Thread(target=time.sleep, args=(60,), daemon=True).start(); n += 1\n"
    source += "except RuntimeError: print(n, flush=True)"
    assert with_limits(memory_mib=1024).run_python(source).stdout == b"15\n"


def test_memory_of_one_process_and_of_all_is_limited():
    finished = with_limits().run_python("x = bytearray(300 * 2**20)")
    assert finished.exit_code == 1 and b"MemoryError" in finished.stderr
    source = "import os, time\nfor _ in range(3): os.fork()\nx = bytearray(b'1') * (80 * 2**20)\ntime.sleep(60)"
    assert with_limits().run_python(source).why == "memory"


def test_a_full_disk_is_the_programs_own():
    source = "import os\ntry:\n    for n in range(100): open(f'/tmp/{n}', 'wb').write(bytes(2**20))\n"
    source += "except OSError as error: print(n, error.errno, len(os.listdir('/dev/shm')) > 1)"
    count, number, _ = with_limits().run_python(source).stdout.split()
    assert int(count) <= 8 and int(number) == 28
    inodes = "try:\n    for n in range(100000): open(f'/tmp/{n}', 'w')\nexcept OSError as error: print(error.errno)"
    assert with_limits().run_python(inodes).stdout == b"28\n"


def test_endless_output_is_cut_off():
    finished = with_limits(output_kib=16).run_python("while True: print('x' * 1000)")
    assert finished.why == "output" and len(finished.stdout) == 16 * 1024 and finished.exit_code is None


def test_a_program_that_ignores_signals_and_leaves_children_is_ended_whole(tmp_path):
    source = "import os, signal, time\nfor n in (1, 2, 3, 13, 15): signal.signal(n, signal.SIG_IGN)\n"
    source += (
        "if not os.fork():\n    os.setsid()\n    if not os.fork(): time.sleep(54321)\n    os._exit(0)\nwhile True: pass"
    )
    finished = with_limits(wall_s=1.0).run_python(source)
    assert finished.why == "time" and finished.exit_code is None
    quick = with_limits().run_python("import os, time\nif not os.fork():\n    os.setsid(); time.sleep(54321)")
    assert quick.exit_code == 0 and quick.wall_s < 15  # the child is not waited for
    assert "54321" not in processes()


def processes():
    results = []
    for path in Path("/proc").iterdir():
        try:
            results.append((path / "cmdline").read_text())
        except OSError:
            continue
    return " ".join(results)


def test_a_run_that_is_killed_takes_its_programs_along(sandbox):
    source = "from sfumato.sandbox.sandbox import *\nSandbox(ProgramLimits(wall_s=300)).run(['/bin/sleep', '54322'])"
    with subprocess.Popen([sys.executable, "-c", source], cwd=ROOT) as run:
        assert waited_for(lambda: "/bin/sleep\0" + "54322" in processes())
        run.kill()
    assert waited_for(lambda: "/bin/sleep\0" + "54322" not in processes())


def waited_for(holds):
    deadline = time.monotonic() + 60
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.05)
    return holds()


def test_deep_recursion_and_crashes_end_the_program_alone():
    source = "import sys\nsys.setrecursionlimit(10**9)\ndef f(x): return [f(x)]\nf(0)"
    assert not with_limits(wall_s=2.0).run_python(source).is_success
    assert with_limits().run_python("import ctypes\nctypes.string_at(0)").exit_code == -signal.SIGSEGV


# What it is for


def test_programs_run_with_input_files_and_exit_code(sandbox):
    source = "import sys\nprint(sys.stdin.read() + open('/tmp/data').read())\nprint('x', file=sys.stderr)\nsys.exit(3)"
    finished = sandbox.run_python(source, stdin=b"in " * 100_000 + b"and ", files={"data": b"out"})
    assert finished.stdout[-8:] == b"and out\n" or finished.why == "output"
    finished = sandbox.run_python(source, stdin=b"in and ", files={"data": b"out"})
    assert (finished.stdout, finished.stderr, finished.exit_code) == (b"in and out\n", b"x\n", 3)
    assert not finished.is_success and "exit code 3: x" in finished.describe()
    assert sandbox.run(["/bin/echo", "hello"]).stdout == b"hello\n"
    subprocesses = "import subprocess; print(subprocess.run(['echo', 'a'], capture_output=True, text=True).stdout)"
    assert sandbox.run_python(subprocesses).stdout == b"a\n\n"


@pytest.mark.parametrize("end", ["exit()", "quit()", "exit(0)", "sys.exit()"])
def test_programs_may_end_as_people_end_them(sandbox, end):
    source = f"'A program.'\nfrom __future__ import annotations\nimport sys\nprint(__name__, __file__)\n{end}\nprint(1)"
    finished = sandbox.run_python(source)
    assert finished.is_success and finished.stdout == b"__main__ /tmp/main.py\n"
    assert b"NameError" in sandbox.run_python("print(site, sys)").stderr, "what ends it is no name of the program"


def test_nothing_of_one_program_is_left_for_the_next(sandbox):
    assert sandbox.run_python("open('/tmp/left', 'w').write('x')").is_success
    assert sandbox.run_python("import os; print(os.listdir('/tmp'))").stdout == b"['main.py']\n"


def test_many_programs_at_the_same_time_keep_apart(sandbox):
    results = {}

    def run(number):
        results[number] = sandbox.run_python(f"open('/tmp/own', 'w').write('{number}'); print(open('/tmp/own').read())")

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {number: int(value.stdout) for number, value in results.items()} == {number: number for number in range(8)}


def test_descriptors_do_not_run_out(sandbox):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        sandbox.run_python("pass")
        with pytest.raises(SandboxError, match="could not be started"):
            sandbox.run(["/bin/no-such-program"])
    assert len(os.listdir("/proc/self/fd")) == before


def test_limits_and_paths_without_meaning_are_refused():
    with pytest.raises(ConfigError, match="memory_mib"):
        ProgramLimits(memory_mib=0)
    with pytest.raises(ConfigError, match="/no/such"):
        Sandbox(readable=["/no/such"])


# Who starts it, and where it refuses


PROBE = """
import sys
sys.path.insert(0, sys.argv[1])
from sfumato.sandbox.sandbox import ProgramLimits, Sandbox
sandbox = Sandbox(ProgramLimits(wall_s=20))
sandbox.check()
print(sandbox.run_python("import os; print(os.getuid())").stdout.decode().strip(), "contained")
"""


def system_python():
    """An interpreter that every user may run."""
    for name in ("python3.14", "python3.13", "python3.12", "python3.11"):
        if result := shutil.which(name, path="/usr/bin:/usr/local/bin"):
            return result
    return None


@pytest.mark.parametrize("user", [0, 65534])
def test_root_and_an_ordinary_user_contain_alike(sandbox, user, tmp_path):
    python = system_python()
    if os.geteuid() != 0 or python is None or shutil.which("setpriv") is None:
        pytest.skip("needs root, setpriv, and a Python that every user may run")
    library = tmp_path / "library"
    shutil.copytree(ROOT / "sfumato" / "sandbox", library / "sfumato" / "sandbox")
    for name in ("__init__.py", "errors.py", "moved.py"):
        shutil.copy(ROOT / "sfumato" / name, library / "sfumato" / name)
    for folder in (library, *library.rglob("*")):
        folder.chmod(0o755)
    for parent in tmp_path.parents:
        if "pytest" in str(parent):  # with several workers there is a folder for each
            parent.chmod(0o755)
    tmp_path.chmod(0o755)
    command = [
        "setpriv",
        f"--reuid={user}",
        f"--regid={user}",
        "--clear-groups",
        python,
        "-I",
        "-c",
        PROBE,
        str(library),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/")
    assert done.stdout == "1000 contained\n", done.stderr


def test_it_refuses_where_namespaces_are_not_permitted(sandbox):
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare")
    shell = f'echo 0 > /proc/sys/user/max_user_namespaces && exec "{PYTHON}" -I -c "$1" "{ROOT}"'
    done = subprocess.run(["unshare", "-Ur", "sh", "-c", shell, "sh", PROBE], capture_output=True, text=True)
    assert "SandboxError: the sandbox cannot be built: creating namespaces" in done.stderr, done.stderr
    single = subprocess.run(["unshare", "-Ur", PYTHON, "-I", "-c", PROBE, str(ROOT)], capture_output=True, text=True)
    assert "finding user 65534" in single.stderr and "contained" not in single.stdout
    assert "user.max_user_namespaces" in done.stderr and "contained" not in done.stdout


@pytest.mark.parametrize(
    ("system", "machine", "release", "words"),
    [
        ("darwin", "arm64", "24.0", "only contained on Linux"),
        ("win32", "AMD64", "10", "only contained on Linux"),
        ("linux", "aarch64", "6.8.0", "x86_64"),
        ("linux", "x86_64", "5.10.0-amd64", "5.14"),
    ],
)
def test_other_systems_are_refused(monkeypatch, system, machine, release, words):
    import platform

    from sfumato.sandbox import sandbox as module

    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(platform, "release", lambda: release)
    with pytest.raises(SandboxError, match=words):
        module._refuse_other_systems.__wrapped__()


def test_the_filter_allows_and_refuses_what_it_says():
    """The program of the filter, run here as the kernel runs it."""

    def verdict(number, argument=0, machine=0xC000003E):
        memory, place, value = {0: number, 4: machine, 16: argument}, 0, 0
        while True:
            code, yes, no, operand = program[place]
            place += 1
            if code == 0x20:
                value = memory[operand]
            elif code == 0x06:
                return operand
            else:
                holds = {0x15: value == operand, 0x35: value >= operand, 0x45: bool(value & operand)}[code]
                place += yes if holds else no

    program = kernel._seccomp_filter(list(kernel.REFUSED.values()))
    allow, refuse, kill = 0x7FFF0000, 0x00050001, 0x80000000
    assert all(verdict(number) == refuse for number in kernel.REFUSED.values())
    assert [verdict(41, family) for family in (1, 2, 10, 16, 40)] == [allow, refuse, refuse, refuse, refuse]
    assert [verdict(53, family) for family in (1, 2)] == [allow, refuse]
    assert [verdict(56, flags) for flags in (17, 0x3D0F00, 0x10000011, 0x20000011)] == [allow, allow, refuse, refuse]
    assert verdict(435) == 0x00050026 and verdict(0) == allow and verdict(59) == allow
    assert verdict(0x40000000) == kill and verdict(0, machine=0x40000003) == kill
