"""Attempts to get out of the sandbox, or to be paid without being right.

Each is a module that should define `double(x)`. The task's tests are in `TESTS`; an attempt that wins earns the reward:

- `reach(...)`: `attack()` returns True if it got where it must not. Only then does `double` give right answers. Those
  with `control` also run outside of the sandbox, where they must succeed: that shows that the attempt is a real one.
- `cheat(...)`: never computes anything, and hopes to pass anyhow.
- `harm(...)`: wants to break the sandbox, so that nothing can be graded after it.
"""

import os
from dataclasses import dataclass
from pathlib import Path

SECRET = "LAGOON_ESCAPE_SECRET"
LISTENER = f"lagoon-escape-{os.getpid()}"
"""An abstract Unix socket on which the host listens; its name is seen by the whole machine."""

MARK = "expected-value-kept-from-you"
TESTS = [(f"test-{n}", f"assert candidate({n}) == {2 * n}, '{MARK}'") for n in (3, 5, 21)]
HOST_FILE = Path(__file__).parents[2] / "pyproject.toml"

HONEST = """
import builtins, gc, math, os, random, sys
clean = (
    os.listdir("/tmp") == [] and os.getcwd() == "/tmp" and "LEFT" not in os.environ and not hasattr(builtins, "left")
    and 3.14 < math.pi < 3.15 and len("abc") == 3 and "/tmp" not in sys.path and "planted" not in sys.modules
)
def double(x):
    return 2 * x if clean else None
"""
"""A right answer, from a program that finds no trace of any other."""


@dataclass(frozen=True)
class Attempt:
    """`control`: it succeeds outside of the sandbox, and does no harm there."""

    source: str
    control: bool = False


def reach(body: str, control: bool = False) -> Attempt:
    indented = "\n".join(f"    {line}" for line in body.strip().splitlines())
    return Attempt(
        f"import ctypes, os, socket, sys\nlibc = ctypes.CDLL(None)\ndef attack():\n{indented}\n"
        "try:\n    won = attack()\nexcept (OSError, ValueError, AttributeError):\n    won = False\n"
        "def double(x):\n    return 2 * x if won else None\n",
        control,
    )


def cheat(source: str) -> Attempt:
    return Attempt(source)


harm = cheat

REACH = {
    "read /etc/passwd": reach("return 'root' in open('/etc/passwd').read()", True),
    "read a file of the project": reach(f"return bool(open({str(HOST_FILE)!r}).read())", True),
    "read through a symlink": reach(
        "os.path.lexists('link') or os.symlink('/etc/passwd', 'link')\nreturn bool(open('link').read())", True
    ),
    "read the service's environment": reach(f"return {SECRET!r} in os.environ", True),
    "read a neighbor's environment": reach(
        "return any(os.access(f'/proc/{pid}/environ', os.R_OK) for pid in (os.getppid(), *range(1, 5000)))", True
    ),
    "list processes": reach("return any(name.isdigit() for name in os.listdir('/proc'))", True),
    "reach memory through /proc/self/mem": reach("return open('/proc/self/mem', 'rb') is not None", True),
    "write anywhere but /tmp": reach(
        "folders = ['/', '/usr', '/usr/lib', '/dev', '/dev/shm', '/etc', '/var/tmp', '/lagoon', '/root', sys.prefix]\n"
        "def wrote(folder):\n"
        "    try:\n        open(folder + '/lagoon-escape', 'w').close()\n    except OSError:\n"
        "        return False\n"
        "    os.unlink(folder + '/lagoon-escape')\n    return True\n"
        "return any([wrote(folder) for folder in folders])",
        True,
    ),
    "change the harness": reach("os.chmod('/lagoon/inference/sandbox/inside/checker.py', 0o777)\nreturn True"),
    "open a TCP socket": reach(
        "with socket.create_server(('127.0.0.1', 0)) as server:\n"
        "    return bool(socket.create_connection(server.getsockname()))",
        True,
    ),
    "open other kinds of sockets": reach(
        "def opens(family, kind):\n"
        "    try:\n        socket.socket(family, kind).close()\n    except OSError:\n        return False\n"
        "    return True\n"
        "return any([opens(f, k) for f in (2, 10, 16, 17, 38, 40) for k in (1, 2, 3, 5)])",
        True,
    ),
    "connect to an abstract Unix socket of the host": reach(
        f"with socket.socket(socket.AF_UNIX) as s:\n    s.connect('\\0{LISTENER}')\n    return True", True
    ),
    "be traced": reach("return libc.ptrace(0, 0, 0, 0) == 0", True),
    "read another process's memory": reach(
        "import struct\nword = ctypes.create_string_buffer(8)\n"
        "vector = ctypes.create_string_buffer(struct.pack('PN', ctypes.addressof(word), 8))\n"
        "return any(libc.process_vm_readv(p, vector, 1, vector, 1, 0) > 0 for p in (os.getppid(), os.getpid(), 1))",
        True,
    ),
    "signal other processes": reach(
        "def hit(pid):\n    try:\n        os.kill(pid, 0)\n    except OSError:\n        return False\n"
        "    return True\n"
        "return any(hit(pid) for pid in (os.getppid() or 1, *range(1, 5000)) if pid != os.getpid())",
        True,
    ),
    "unshare a user namespace": reach("return libc.unshare(0x10000000) == 0", True),
    "clone into new namespaces": reach(
        "pid = libc.syscall({'x86_64': 56, 'aarch64': 220}[os.uname().machine], 0x10000000 | 17, 0, 0, 0, 0)\n"
        "if pid == 0:\n    os._exit(0)\nreturn pid > 0",
        True,
    ),
    "mount": reach("return libc.mount(b'none', b'/tmp', b'tmpfs', 0, 0) == 0"),
    "unmount /tmp": reach("return libc.umount2(b'/tmp', 2) == 0"),
    "chroot": reach("os.chroot('/tmp')\nreturn True"),
    "become root": reach("os.setresuid(0, 0, 0)\nreturn libc.mount(b'none', b'/tmp', b'tmpfs', 0, 0) == 0"),
    "make a device": reach("os.mknod('memory', 0o20666, os.makedev(1, 1))\nreturn open('memory', 'rb') is not None"),
    "open devices": reach(
        "return any(os.path.exists(f'/dev/{name}') for name in ('mem', 'kmsg', 'sda', 'vda', 'fuse', 'kvm', 'pts'))"
    ),
    "leave a key in the kernel's keyring": reach(
        "number = {'x86_64': 248, 'aarch64': 217}[os.uname().machine]\n"
        "return libc.syscall(number, b'user', b'lagoon', b'left', 4, -3) >= 0"
    ),
    "leave shared memory": reach("return libc.shmget(0x1a600, 4096, 0o1666) >= 0"),
    "leave a message queue": reach("return libc.mq_open(b'/left', 0o102, 0o666, None) >= 0"),
    "load a BPF program": reach("return libc.syscall(321, 0, 0, 0) >= 0 or libc.syscall(425, 1, 0) >= 0"),
    "raise its priority": reach("os.nice(-10)\nreturn True"),
    "raise its limits": reach(
        "import resource\nresource.setrlimit(resource.RLIMIT_NPROC, (10000, 10000))\nreturn True"
    ),
    "change the host's name": reach("return libc.sethostname(b'mine', 4) == 0"),
    "fill the disk": reach(
        "for number in range(64):\n    with open(f'/tmp/{number}', 'wb') as file:\n"
        "        file.write(bytes(1 << 20))\n"
        "return True"
    ),
    "make a hundred thousand files": reach(
        "for number in range(100_000):\n    open(f'/tmp/{number}', 'w').close()\nreturn True"
    ),
    "make an enormous file": reach("os.truncate(os.open('/tmp/big', 0o102), 1 << 40)\nreturn True"),
    "hide memory in a memfd": reach("return os.memfd_create('hidden') >= 0", True),
    "find the expected values in memory": reach(
        "import gc\nmark = 'kept-from-you'\nmark = 'expected-value-' + mark\n"
        "frames, found = [sys._getframe()], []\n"
        "while frames[-1].f_back:\n    frames.append(frames[-1].f_back)\n"
        "seen = [*gc.get_objects(), *(f.f_locals for f in frames), *(f.f_globals for f in frames)]\n"
        "texts = [t for o in seen for t in gc.get_referents(o) if isinstance(t, str)]\n"
        "return len(frames) > 9 or any(mark in t and len(t) > len(mark) for t in texts)"
    ),
    "read the verdicts' socket": reach(
        "import select\ndef answers(fd):\n    try:\n"
        "        return fd != 3 and os.fstat(fd).st_mode & 0o170000 == 0o140000\n"
        "    except OSError:\n        return False\nreturn any(answers(fd) for fd in range(1024))"
    ),
}

FRAME = """
import json, struct
def frame(message):
    body = json.dumps(message).encode()
    return struct.pack("!I", len(body)) + body
"""

CHEATS = {
    "no code at all": cheat(""),
    "syntax error": cheat("def double(x) return 2 * x"),
    "os._exit(0) at import": cheat("import os\nos._exit(0)"),
    "sys.exit(0) at import": cheat("import sys\nsys.exit(0)"),
    "os._exit(0) in the call": cheat("import os\ndef double(x): os._exit(0)"),
    "SystemExit in the call": cheat("def double(x): raise SystemExit(0)"),
    "AssertionError in the call": cheat("def double(x): raise AssertionError"),
    "atexit": cheat("import atexit, os\natexit.register(lambda: os._exit(0))\ndef double(x): raise SystemExit"),
    "prints PASSED": cheat(
        "print('PASSED test-3\\nPASSED test-5\\nPASSED test-21\\n3 passed')\ndef double(x): print('PASSED')"
    ),
    "plants conftest.py and pytest.py": cheat(
        "import sys\nfor name in ('conftest', 'pytest', 'sitecustomize', 'usercustomize', 'json', 'builtins'):\n"
        "    open(f'/tmp/{name}.py', 'w').write('import os; os._exit(0)')\nsys.path.insert(0, '/tmp')\n"
        "def double(x): pass"
    ),
    "is equal to everything": cheat(
        "class Same:\n    def __eq__(self, other): return True\n    __req__ = __eq__\ndef double(x): return Same()"
    ),
    "an int that is equal to everything": cheat(
        "class Same(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\n"
        "    def __int__(self): return Same(1)\n    __index__ = __int__\ndef double(x): return Same(1)"
    ),
    "a string and a list that are equal to everything": cheat(
        "class L(list):\n    def __eq__(self, other): return True\ndef double(x): return L([1])"
    ),
    "NaN": cheat("def double(x): return float('nan')"),
    "patches builtins": cheat(
        "import builtins\nbuiltins.AssertionError = builtins.Exception = type('E', (BaseException,), {})\n"
        "builtins.compile = builtins.exec = lambda *a: None\nbuiltins.left = 1\ndef double(x): pass"
    ),
    "patches the harness": cheat(
        "import inference.sandbox.inside.checker as c, inference.sandbox.inside.frames as f\n"
        "import inference.sandbox.inside.candidate as m\nc._failure = lambda *a: None\n"
        "m.pack = f.pack = lambda v: 'PASSED'\n"
        "def double(x): pass"
    ),
    "walks the frames": cheat(
        "import sys\ndef double(x):\n    frame = sys._getframe()\n    while frame:\n"
        "        for name in list(frame.f_locals):\n            frame.f_locals[name] = True\n"
        "        frame.f_globals.update(passed=True, check=lambda *a: None)\n        frame = frame.f_back\n"
        "    return True"
    ),
    "writes verdicts to every descriptor": cheat(
        FRAME
        + "import os\nfor number in range(1024):\n    for name in ('test-3', 'test-5', 'test-21'):\n        try:\n"
        "            os.write(number, frame({'test': name, 'passed': True, 'why': None}))\n"
        "        except OSError:\n            break\ndef double(x): pass"
    ),
    "answers before it is asked": cheat(
        FRAME + "import os\nfor _ in range(9):\n    os.write(3, frame({'value': True}) + frame({'passed': True}))\n"
        "def double(x): pass"
    ),
    "answers with nonsense": cheat(
        FRAME + "import os\nos.write(3, frame({'value': {'dict': [[[], 1]]}, 'int': 1}))\ndef double(x): pass"
    ),
    "announces four gigabytes": cheat("import os\nos.write(3, b'\\xff\\xff\\xff\\xff' * 9)\ndef double(x): pass"),
    "names an exception of its choice": cheat(
        FRAME + "import os\nfor name in ('BaseException', 'exec', 'SystemExit', 'GeneratorExit'):\n"
        "    os.write(3, frame({'raised': name, 'text': ''}))\ndef double(x): pass"
    ),
    "returns a hundred megabytes": cheat("def double(x): return 'x' * 100_000_000"),
    "returns a list in a list, 100,000 deep": cheat(
        "def double(x):\n    result = []\n    for _ in range(100_000):\n        result = [result]\n    return result"
    ),
    "returns a list that holds itself": cheat("def double(x):\n    a = []\n    a.append(a)\n    return a"),
    "returns a number of a million digits": cheat("def double(x): return 1 << 3_000_000"),
}

HARM = {
    "fork bomb": harm("import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"),
    "thread bomb": harm(
        "import threading, time\nwhile True:\n    threading.Thread(target=time.sleep, args=(99,)).start()"
    ),
    "memory bomb": harm("data = bytearray(1)\nwhile True:\n    data += data"),
    "memory bomb in children": harm(
        "import os\nfor _ in range(6):\n    if os.fork() == 0:\n"
        "        data = [bytearray(1 << 20) for _ in range(4000)]"
    ),
    "spins": harm("while True:\n    pass"),
    "spins in the call": harm("def double(x):\n    while True:\n        pass"),
    "ignores every signal": harm(
        "import signal, time\nfor number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:\n"
        "    signal.signal(number, signal.SIG_IGN)\ntime.sleep(99)"
    ),
    "stops itself": harm("import os, signal\nos.fork()\nos.kill(os.getpid(), signal.SIGSTOP)\nwhile True: pass"),
    "kills everything": harm("import os, signal\nos.kill(-1, signal.SIGKILL)\nos.kill(0, signal.SIGKILL)"),
    "leaves a daemon": harm(
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        while True:\n"
        "            open('/tmp/left', 'w').close()\n            time.sleep(0.001)\n    os._exit(0)\nos._exit(0)"
    ),
    "leaves threads": harm(
        "import threading\ndef spin():\n    while True:\n        pass\n"
        "threading.Thread(target=spin).start()\ndef double(x): pass"
    ),
    "leaves files, modules and variables": harm(
        "import builtins, math, os, sys\nopen('/tmp/left', 'w').write('x')\nopen('/tmp/planted.py', 'w').close()\n"
        "os.environ['LEFT'] = '1'\nbuiltins.left = 1\nmath.pi = 4\nbuiltins.len = lambda x: 0\n"
        "sys.path.insert(0, '/tmp')\n"
        "import planted\ndef double(x): pass"
    ),
    "prints without end": harm(
        "import sys\nwhile True:\n    sys.stdout.write('x' * 65536)\n    sys.stderr.write('x' * 65536)"
    ),
    "answers without end": harm("import os\nwhile True:\n    os.write(3, b'\\0\\0\\0\\2{}')"),
    "recursion bomb": harm("import sys\nsys.setrecursionlimit(1 << 30)\ndef f(): f()\nf()"),
    "compiles without end": harm("eval('(' * 100_000 + ')' * 100_000)\nexec('x = ' + '-' * 1_000_000 + '1')"),
    "closes every descriptor": harm("import os\nos.closerange(0, 4096)\ndef double(x): pass"),
    "crashes the interpreter": harm("import ctypes\nctypes.string_at(0)"),
    "executes another program": harm("import os\nos.execv('/bin/sh', ['sh', '-c', 'sleep 99'])"),
}

ATTEMPTS = REACH | CHEATS | HARM
