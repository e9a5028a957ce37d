"""The launcher ./rn with a Python that only pretends: what it sets up, when, and what fails."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Plays an interpreter, venv and pip: it notes what it was asked to do, and "rn" is itself again.
FAKE_PYTHON = """#!/bin/sh
case "$1" in
    -c) case "$2" in
        *ensurepip*) [ ! -e "$FAKE/no-venv" ] ;;
        *print*) echo python3.13-venv ;;
        *) [ ! -e "$FAKE/too-old" ] ;;
        esac ;;
    -m) case "$2 $3" in
        "venv "*) echo venv >> "$FAKE/log"; mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
        "pip install")
            echo "pip $*" | sed "s|$PWD|.|g" >> "$FAKE/log"
            : > "$TMPDIR/pip-unpacked"
            if [ -e "$FAKE/gate" ]; then echo "at the gate"; cat "$FAKE/gate"; fi
            if [ -e "$FAKE/swamp" ]; then exec cat "$FAKE/swamp"; fi
            if [ -e "$FAKE/says" ]; then cat "$FAKE/says"; exit 1; fi
            if [ -e "$FAKE/no-network" ]; then
                printf '   ERROR: No network here\\n   [end of output]\\n\\nSee above.\\n' >&2
                exit 1
            fi
            rm "$TMPDIR/pip-unpacked"
            rn=${0%/*}/rn
            printf '#!/bin/sh\\nexec "%s" "$0" "$@"\\n' "$0" > "$rn"; chmod +x "$rn" ;;
        esac ;;
    */rn)
        shift
        if [ -n "${RN_LOOK_ONLY:-}" ]; then [ ! -e "$FAKE/mistyped" ]; exit; fi
        echo "rn $*"; if [ "$1" = agent ]; then cat "$FAKE/until"; fi ;;
esac
"""


class Checkout:
    """A clone of the repository on a machine whose programs are fakes."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.place = home / "a clone"
        self.place.mkdir()
        for name in ("rn", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, self.place / name)
        self.fake = home / "fake"
        self.fake.mkdir()
        self.bin = home / "bin"
        self.bin.mkdir()
        self.program("python3.13", FAKE_PYTHON)
        self.program("id", "#!/bin/sh\necho 1000\n")
        self.program("apt-get", '#!/bin/sh\necho "apt-get $*" >> "$FAKE/log"\n')
        self.env = {
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "FAKE": str(self.fake),
            "TMPDIR": str(home),
            "RN_PYTHON": "python3.13",
        }

    def program(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["./rn", *words],
            cwd=self.place,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def end_in_the_middle(self, number: signal.Signals, *words: str) -> tuple[int, str]:
        """Ends the launcher, and only it, by a signal while pip is at work."""
        swamp = self.fake / "swamp"
        os.mkfifo(swamp)
        # It opens for writing once pip reads from it: then pip is in the middle, for good.
        with self.start(*words) as process, swamp.open("w"):
            process.send_signal(number)
            _, err = process.communicate(timeout=60)
        swamp.unlink()
        return process.returncode, err

    def change_pins(self) -> None:
        with (self.place / "constraints.txt").open("a") as file:
            file.write("something==1.0\n")

    def start_after_gate(self, *words: str) -> subprocess.Popen[str]:
        """Start another while one is held at the gate; let that one on when this one waits."""
        with (self.fake / "gate").open("w"):
            process = self.start(*words)
            assert process.stderr is not None
            assert "waiting for it" in process.stderr.readline()
            return process

    def rn(self, *words: str) -> tuple[int, str, str]:
        with self.start(*words) as process:
            out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    @property
    def environments(self) -> list[Path]:
        """From the oldest to the newest, finished or not."""
        return sorted((self.place / ".venv").glob("[0-9]*"), key=lambda path: int(path.name))

    @property
    def log(self) -> list[str]:
        path = self.fake / "log"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def extras(self) -> list[str]:
        """Of each pip install so far, in turn."""
        return [line.partition("-e .")[2] for line in self.log if line.startswith("pip")]


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Checkout]:
    return Checkout(tmp_path)


def test_it_sets_up_once_and_then_only_runs(checkout: Checkout) -> None:
    code, out, err = checkout.rn("ps", "-a", "two words")
    assert (code, out) == (0, "rn ps -a two words\n")
    assert err.count("\n") == 1
    assert checkout.rn("ps") == (0, "rn ps\n", "")
    assert checkout.log[0] == "venv"
    assert checkout.extras == [""]


def test_extras_come_when_needed_and_stay(checkout: Checkout) -> None:
    checkout.rn("demo")
    checkout.rn("sim")
    checkout.rn("up")
    checkout.rn("demo", "--testbed")
    assert checkout.extras == ["", "[sim]"]
    checkout.change_pins()
    checkout.rn("up")
    assert checkout.extras == ["", "[sim]", "[sim]"]
    checkout.rn("--state", "kube", "--gateway=x", "kube", "controller")
    assert checkout.extras[3:] == ["[kube,sim]"]


def test_help_brings_no_extras(checkout: Checkout) -> None:
    checkout.rn("kube", "--help")
    checkout.rn("bench", "loss", "-h")
    assert checkout.extras == [""]
    checkout.rn("chain", "run", "--", "python", "--help")
    assert checkout.extras == ["", "[learn,sim]"]


def test_what_was_mistyped_brings_no_extras(checkout: Checkout) -> None:
    checkout.rn("ps")
    mistyped = checkout.fake / "mistyped"
    mistyped.touch()
    assert checkout.rn("sim", "nonexistent.toml") == (1, "", "")
    assert checkout.rn("bench", "lost") == (1, "", "")
    assert checkout.extras == [""]
    mistyped.unlink()
    code, out, _ = checkout.rn("sim", "two-labs.toml")
    assert (code, out) == (0, "rn sim two-labs.toml\n")
    assert checkout.extras == ["", "[sim]"]


def test_it_can_be_called_through_a_link_from_anywhere(checkout: Checkout) -> None:
    (checkout.home / "bin" / "rn").symlink_to(checkout.place / "rn")
    done = subprocess.run(
        ["rn", "ps"],
        cwd=checkout.home,
        env=checkout.env,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "rn ps\n"
    assert (checkout.place / ".venv").is_dir()


def test_torch_comes_only_where_nothing_may_be_skipped(checkout: Checkout) -> None:
    (checkout.place / "scripts").mkdir()
    script = checkout.place / "scripts" / "test"
    script.write_text('#!/bin/sh\necho "test: $*"\n')
    script.chmod(0o755)
    _, out, _ = checkout.rn("test", "-k", "vault")
    assert out == f"test: {checkout.environments[0]} -k vault\n"
    checkout.env["RN_REQUIRE_ALL"] = "1"
    checkout.rn("test")
    assert checkout.extras == ["[dev,learn,sim]", "[dev,learn,sim,torch]"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_set_up_that_is_ended_harms_nothing_and_is_repeated(
    checkout: Checkout, number: signal.Signals
) -> None:
    checkout.rn("up")
    code, err = checkout.end_in_the_middle(number, "sim")
    if number != signal.SIGKILL:
        assert code == 128 + number
        assert "interrupted; the same command starts over" in err
        assert len(checkout.environments) == 1
    assert checkout.rn("ps") == (0, "rn ps\n", "")
    assert checkout.extras == ["", "[sim]"]
    code, out, err = checkout.rn("sim")
    assert (code, out) == (0, "rn sim\n")
    assert "another set-up" not in err
    assert checkout.extras == ["", "[sim]", "[sim]"]
    # What pip had unpacked and our log went with it, and so did what it had begun.
    assert {path.name for path in checkout.home.iterdir()} == {"a clone", "bin", "fake"}
    assert not (checkout.place / ".venv" / "set-up.log").exists()
    assert len(checkout.environments) == 2


def test_the_first_set_up_can_be_ended_and_is_repeated(checkout: Checkout) -> None:
    checkout.end_in_the_middle(signal.SIGKILL, "ps")
    assert checkout.rn("ps")[:2] == (0, "rn ps\n")
    assert len(checkout.environments) == 1


def test_without_a_network_everything_set_up_before_goes_on(checkout: Checkout) -> None:
    checkout.rn("up")
    (checkout.fake / "no-network").touch()
    code, out, err = checkout.rn("sim")
    assert (code, out) == (69, "")
    assert "installing dependencies (sim): No network here (the full log is in" in err
    assert "for every command that needs no sim" in err
    assert checkout.rn("nodes") == (0, "rn nodes\n", "")
    checkout.change_pins()
    # An owner does not wait; whoever starts something has it tried.
    assert checkout.rn("reclaim", "--now") == (0, "rn reclaim --now\n", "")
    assert len(checkout.extras) == 2
    code, out, err = checkout.rn("up")
    assert (code, out) == (0, "rn up\n")
    assert "going on with what was set up before" in err
    assert len(checkout.environments) == 1


def test_what_runs_keeps_its_environment(checkout: Checkout) -> None:
    until = checkout.fake / "until"
    os.mkfifo(until)
    with checkout.start("agent") as agent, until.open("w"):
        [first] = checkout.environments
        for _ in range(3):
            checkout.change_pins()
            checkout.rn("up")
            assert (first / "bin" / "rn").exists()
        assert len(checkout.environments) == 3  # Its own, the last, and the one before.
    agent.communicate(timeout=60)
    checkout.change_pins()
    checkout.rn("up")
    assert first not in checkout.environments


def test_an_environment_of_an_earlier_version_serves_until_it_is_replaced(
    checkout: Checkout,
) -> None:
    checkout.rn("up")
    [made] = checkout.environments
    old = checkout.place / ".venv"
    (old / "now").unlink()
    for path in made.iterdir():
        path.rename(old / path.name)
    made.rmdir()
    for path in (old / "bin").iterdir():
        path.write_text(path.read_text().replace(str(made), str(old)))
    assert checkout.rn("ps") == (0, "rn ps\n", "")
    assert (old / "bin" / "rn").exists()
    for _ in range(2):
        checkout.change_pins()
        assert checkout.rn("up")[:2] == (0, "rn up\n")
    assert not (old / "bin").exists()


def test_two_at_once_set_up_once(checkout: Checkout) -> None:
    os.mkfifo(checkout.fake / "gate")
    with checkout.start("ps") as first, checkout.start_after_gate("nodes") as second:
        assert first.communicate(timeout=60)[0] == "rn ps\n"
        assert second.communicate(timeout=60)[0] == "rn nodes\n"
    assert len(checkout.extras) == 1


def test_a_failed_set_up_names_its_log_and_can_be_repeated(checkout: Checkout) -> None:
    (checkout.fake / "no-network").touch()
    code, out, err = checkout.rn("ps")
    assert (code, out) == (69, "")
    log = checkout.place / ".venv" / "set-up.log"
    assert f"installing dependencies: No network here (the full log is in {log};" in err
    assert "See above" in log.read_text()
    (checkout.fake / "no-network").unlink()
    assert checkout.rn("ps")[:2] == (0, "rn ps\n")


def test_what_pip_says_without_a_network_is_told_in_plain_words(checkout: Checkout) -> None:
    (checkout.fake / "says").write_text(
        "  ERROR: Cannot install hatchling because these have conflicting dependencies.\n"
        "  ERROR: ResolutionImpossible: for help visit this and that\n\n"
        "╰─> See above for output.\n"
    )
    code, _, err = checkout.rn("ps")
    assert code == 69
    assert "packages cannot be fetched; is there a network?" in err
    assert "See above" not in err


def test_a_checkout_that_was_moved_is_set_up_again(checkout: Checkout) -> None:
    checkout.rn("ps")
    checkout.place = checkout.place.rename(checkout.home / "moved")
    assert checkout.rn("ps")[:2] == (0, "rn ps\n")
    assert checkout.log.count("venv") == 2
    now = (checkout.place / ".venv" / "now").resolve()
    assert f'"{now}/bin/python"' in (now / "bin" / "rn").read_text()


def test_a_missing_venv_module_gets_the_one_line_that_mends_it(checkout: Checkout) -> None:
    (checkout.fake / "no-venv").touch()
    code, _, err = checkout.rn("ps")
    assert code == 69
    assert "run: sudo apt-get install python3.13-venv" in err
    assert (checkout.log, checkout.environments) == ([], [])


def test_root_has_the_missing_module_installed(checkout: Checkout) -> None:
    (checkout.fake / "no-venv").touch()
    checkout.program("id", "#!/bin/sh\necho 0\n")
    checkout.program(
        "apt-get", '#!/bin/sh\necho "apt-get $*" >> "$FAKE/log"\nrm -f "$FAKE/no-venv"\n'
    )
    assert checkout.rn("ps")[:2] == (0, "rn ps\n")
    assert checkout.log[1].endswith("python3.13-venv")


def test_too_old_a_python_is_refused(checkout: Checkout) -> None:
    (checkout.fake / "too-old").touch()
    code, _, err = checkout.rn("ps")
    assert code == 69
    assert "is not a Python 3.11 or newer" in err


def test_a_directory_of_someone_elses_is_never_removed(checkout: Checkout) -> None:
    precious = checkout.home / "precious"
    precious.mkdir()
    (precious / "thesis.tex").write_text("all my work")
    checkout.env["RN_VENV"] = str(precious)
    code, _, err = checkout.rn("ps")
    assert code == 69
    assert "set RN_VENV to another directory" in err
    assert (precious / "thesis.tex").read_text() == "all my work"
