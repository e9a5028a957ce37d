"""The examples do what they say, also without ReclaimNet."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def command(name, *args):
    return [sys.executable, str(ROOT / "examples" / name), *args]


def environment(**more):
    kept = {key: value for key, value in os.environ.items() if not key.startswith("RN_")}
    return {**kept, "PYTHONPATH": str(ROOT / "src"), **more}


def last_line(done):
    return done.stdout.splitlines()[-1]


def run(name, *args, **env):
    return subprocess.run(
        command(name, *args), env=environment(**env), capture_output=True, text=True, check=True
    )


def test_the_network_learns_and_a_run_in_two_parts_gives_the_same_bits(tmp_path):
    whole = run("train_numpy.py", "--steps", "300", "--padding", "1", "--dense")
    keep = ("--padding", "1", "--dense", "--local", str(tmp_path))
    run("train_numpy.py", "--steps", "200", *keep)
    second = run("train_numpy.py", "--steps", "300", *keep)
    assert second.stdout.startswith("from step 200,")
    assert last_line(second) == last_line(whole)
    before, after = (float(word.strip(",")) for word in last_line(whole).split()[2:5:2])
    assert after < before / 2


def test_a_run_of_few_steps_ends_well():
    assert last_line(run("train_numpy.py", "--steps", "3")).startswith("done: no loss noted yet, ")


def test_the_plain_script_leaves_with_85_on_sigterm_and_goes_on_from_there(tmp_path):
    quick = ("--steps", "60", "--delay", "0")
    whole = run("train_signal.py", *quick, RN_CHECKPOINT_DIR=str(tmp_path / "a"))
    env = environment(RN_CHECKPOINT_DIR=str(tmp_path / "b"))
    args = command("train_signal.py", "--steps", "60", "--delay", "0.01")
    with subprocess.Popen(args, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "from step 0\n"
        process.send_signal(signal.SIGTERM)
        process.stdout.read()
        assert process.wait() == 85
    assert (tmp_path / "b" / ".saved").read_text().isdigit()
    again = run("train_signal.py", *quick, RN_CHECKPOINT_DIR=str(tmp_path / "b"))
    assert last_line(again) == last_line(whole)


@pytest.mark.parametrize(
    "script",
    [
        pytest.param("train_lightning.py", marks=pytest.mark.needs("lightning")),
        pytest.param("train_transformers.py", marks=pytest.mark.needs("transformers")),
    ],
)
def test_a_trainer_saves_when_it_is_asked_and_goes_on_from_there(script, tmp_path):
    env = environment(RN_CHECKPOINT_DIR=str(tmp_path))
    args = command(script, "--steps", "1000000", "--delay", "0.01")

    def read_until(words):
        return next(line for line in process.stdout if words in line)

    with subprocess.Popen(args, env=env, stdout=subprocess.PIPE, text=True) as process:
        read_until("from step 0")
        process.send_signal(signal.SIGUSR1)
        read_until("saved at step")
        process.send_signal(signal.SIGTERM)
        last = int(read_until("saved at step").split()[-1])
        process.stdout.read()
        assert process.wait() == 85
    assert (tmp_path / ".saved").read_text() == str(last)
    again = run(script, "--steps", str(last + 20), "--delay", "0", RN_CHECKPOINT_DIR=str(tmp_path))
    assert f"from step {last}\n" in again.stdout
    assert last_line(again) == f"done at step {last + 20}"
