"""Configuration: which value wins, which is refused, and who may read it."""

from pathlib import Path

import pytest

from reclaimnet.apps import config
from reclaimnet.errors import BadConfig


class Person:
    """Someone's environment and files."""

    def __init__(self, home: Path) -> None:
        self.env = {"HOME": str(home), "XDG_CONFIG_HOME": str(home / "xdg")}
        self.user = home / "xdg" / "reclaimnet" / "config.toml"
        self.project = home / "reclaimnet.toml"
        self.system = home / "etc.toml"
        self.user.parent.mkdir(parents=True)

    def load(self, **flags: str) -> config.Config:
        named = {key.replace("_", "."): value for key, value in flags.items()}
        return config.load(flags=named, env=self.env, project=self.project, system=self.system)


@pytest.fixture
def person(tmp_path: Path) -> Person:
    return Person(tmp_path)


def test_defaults_need_no_file(person: Person, tmp_path: Path) -> None:
    loaded = person.load()
    assert loaded.gateway_url is None
    assert loaded.state == tmp_path / ".local/state/reclaimnet"
    assert loaded.agents == loaded.state / "agents"
    assert loaded.origins == {"state": "default"}


def test_each_layer_gives_way_to_the_one_above(person: Person) -> None:
    person.system.write_text('[nats]\nurl = "system"\n')
    assert person.load().nats_url == "system"
    person.user.write_text('[nats]\nurl = "user"\n')
    assert person.load().nats_url == "user"
    person.project.write_text('nats.url = "project"\n')
    assert person.load().nats_url == "project"
    person.env["RECLAIMNET_NATS__URL"] = "environment"
    assert person.load().nats_url == "environment"
    loaded = person.load(nats_url="flag")
    assert (loaded.nats_url, loaded.origins["nats.url"]) == ("flag", "flag")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('[gateway]\nulr = "x"\n', "unknown key gateway.ulr; did you mean gateway.url?"),
        ("[gateway]\nurl = 5\n", "gateway.url must be a text in quotes"),
        ("[gateway\n", "is not valid TOML"),
    ],
)
def test_a_wrong_file_is_refused_by_name(person: Person, text: str, sentence: str) -> None:
    person.user.write_text(text)
    with pytest.raises(BadConfig) as refusal:
        person.load()
    assert str(person.user) in str(refusal.value)
    assert sentence in str(refusal.value)


def test_a_misspelt_variable_is_refused(person: Person) -> None:
    person.env["RECLAIMNET_GATEWAY_URL"] = "x"
    with pytest.raises(BadConfig, match=r"did you mean RECLAIMNET_GATEWAY__URL\?"):
        person.load()


def test_the_token_is_remembered_for_this_user_alone(person: Person) -> None:
    person.user.write_text('state = "/some/where"\n')
    person.user.chmod(0o644)
    odd = 'a"b\\c\n'
    path = config.remember_gateway(url="http://one", token=odd, env=person.env)
    assert path == person.user
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(path.parent.iterdir()) == [path]
    loaded = person.load()
    assert (loaded.gateway_url, loaded.gateway_token) == ("http://one", odd)
    assert loaded.state == Path("/some/where")


def test_a_directory_cannot_have_my_token_sent_elsewhere(person: Person) -> None:
    config.remember_gateway(url="http://mine", token="secret", env=person.env)
    person.project.write_text('[gateway]\nurl = "http://theirs"\n')
    with pytest.raises(BadConfig, match="is for another one"):
        person.load()
    person.project.write_text('[gateway]\nurl = "http://mine"\n')
    assert person.load().gateway_token == "secret"
    person.project.write_text('[gateway]\nurl = "http://theirs"\ntoken = "theirs"\n')
    assert person.load().gateway_token == "theirs"


def test_a_directory_cannot_say_by_whom_my_gateway_is_known(person: Person) -> None:
    config.remember_gateway(url="https://mine", token="secret", ca="MINE", env=person.env)
    assert person.load().gateway_ca == "MINE"
    person.project.write_text('[gateway]\nca = "THEIRS"\n')
    with pytest.raises(BadConfig, match="not its own"):
        person.load()


def test_a_new_gateway_does_not_inherit_the_authority_of_the_old(person: Person) -> None:
    config.remember_gateway(url="https://one", token="secret", ca="ONE", env=person.env)
    config.remember_gateway(url="http://two", token="secret", env=person.env)
    assert person.load().gateway_ca is None
