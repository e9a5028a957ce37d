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
    path = person.load().file
    config.remember_gateway(person.user, url="http://one", token=odd)
    assert path == person.user
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(path.parent.iterdir()) == [path]
    loaded = person.load()
    assert (loaded.gateway_url, loaded.gateway_token) == ("http://one", odd)
    assert loaded.state == Path("/some/where")


def test_a_directory_cannot_have_my_token_sent_elsewhere(person: Person) -> None:
    config.remember_gateway(person.user, url="http://mine", token="secret")
    person.project.write_text('[gateway]\nurl = "http://theirs"\n')
    with pytest.raises(BadConfig, match="is for another one"):
        person.load()
    person.project.write_text('[gateway]\nurl = "http://mine"\n')
    assert person.load().gateway_token == "secret"
    person.project.write_text('[gateway]\nurl = "http://theirs"\ntoken = "theirs"\n')
    assert person.load().gateway_token == "theirs"


def test_a_directory_cannot_say_by_whom_my_gateway_is_known(person: Person) -> None:
    config.remember_gateway(person.user, url="https://mine", token="secret", ca="MINE")
    assert person.load().gateway_ca == "MINE"
    person.project.write_text('[gateway]\nca = "THEIRS"\n')
    with pytest.raises(BadConfig, match="not its own"):
        person.load()


def test_a_new_gateway_does_not_inherit_the_authority_of_the_old(person: Person) -> None:
    config.remember_gateway(person.user, url="https://one", token="secret", ca="ONE")
    config.remember_gateway(person.user, url="http://two", token="secret")
    assert person.load().gateway_ca is None


def test_a_state_of_its_own_has_a_configuration_of_its_own(person: Person, tmp_path: Path) -> None:
    config.remember_gateway(person.user, url="https://first", token="one", ca="FIRST")
    other = tmp_path / "other"
    told = person.load(state=str(other))
    assert told.file == other / "config.toml"
    assert told.gateway_url == "https://first", "there is no campus of its own yet"
    config.remember_gateway(told.file, url="http://second", token="two")
    second = person.load(state=str(other))
    assert (second.gateway_url, second.gateway_token) == ("http://second", "two")
    assert second.gateway_ca is None, "that of the first proves nothing about the second"
    assert second.origins["gateway.url"] == str(told.file)
    assert told.file.stat().st_mode & 0o777 == 0o600
    first = person.load()
    assert (first.gateway_url, first.gateway_token) == ("https://first", "one")
    assert first.file == person.user


def test_the_usual_state_said_aloud_is_the_usual_one(person: Person, tmp_path: Path) -> None:
    """`rn up` starts itself anew, and says then where its state is."""
    usual = person.load()
    assert person.load(state=str(usual.state)).file == person.user
    person.env["RECLAIMNET_STATE"] = str(tmp_path / "other")
    assert person.load(state=str(tmp_path / "other")).file == person.user
    assert person.load(state=str(usual.state)).file == usual.state / "config.toml"


def test_what_is_said_where_one_stands_does_not_lead_away_from_the_state_that_was_named(
    person: Person, tmp_path: Path
) -> None:
    person.project.write_text('[gateway]\nurl = "http://theirs"\ntoken = "theirs"\n')
    own = tmp_path / "other" / "config.toml"
    config.remember_gateway(own, url="http://second", token="two")
    told = person.load(state=str(own.parent))
    assert (told.gateway_url, told.gateway_token) == ("http://second", "two")
    own.write_text('[gateway]\ntoken = "two"\n')
    person.project.write_text('[gateway]\nurl = "http://theirs"\n')
    with pytest.raises(BadConfig, match="is for another one"):
        person.load(state=str(own.parent))
