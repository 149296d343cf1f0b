"""The text itself: YAML, lines and the environment."""

import pytest

from tests.unit.config.texts import SMALLEST, parsed, problems_of


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        pytest.param("broker:\n\tkind: none\n", "t.yaml:2: not valid YAML: found character '\\t'", id="tab"),
        pytest.param("broker: [a\n", "t.yaml:2: not valid YAML: expected ',' or ']'", id="open-list"),
        pytest.param(
            "a: b: c\n", "t.yaml:1: not valid YAML: mapping values are not allowed here", id="colon"
        ),
        pytest.param("a: 1\nb: \x01\n", "t.yaml:2: not valid YAML: a control character", id="control"),
        pytest.param("a: 1\n---\nb: 2\n", "t.yaml:2: not valid YAML", id="two-documents"),
        pytest.param("topics:\n  *: {}\n", "t.yaml:2: not valid YAML: aliases are not supported", id="star"),
        pytest.param("a: &x 1\nb: *x\n", "t.yaml:2: not valid YAML: aliases are not supported", id="alias"),
        pytest.param("a: [${X}]\n", "put ${NAME} in quotes inside [ ]", id="substitution-in-flow"),
        pytest.param("a: !x!hunter2\n", "a value that begins with ! or % must be in quotes", id="tag-handle"),
        pytest.param("a: " + "[" * 5000, "nested too deeply", id="depth"),
    ],
)
def test_yaml_fault_names_its_line(text, problem):
    """A text that is not YAML is one problem, with its line and what to do."""
    found = problems_of(text)
    assert len(found) == 1
    assert problem in found[0]
    assert "hunter2" not in found[0]


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n", "---\n", "null\n"])
def test_empty_text_says_what_is_needed(text):
    """A file without properties has another error than one with wrong properties."""
    assert problems_of(text) == ["t.yaml: is empty; it needs at least broker and state_directory"]


@pytest.mark.parametrize("text", ["just words\n", "- a\n- b\n", "42\n"])
def test_text_without_properties_is_refused(text):
    """A list or a scalar is no configuration."""
    assert problems_of(text) == ["t.yaml:1: must hold properties, one `name: value` on each line"]


def test_duplicate_key_names_both_lines():
    """YAML would silently take the last of two; here it is a fault, at every depth."""
    text = SMALLEST + "log: {level: info, level: error}\nstate_directory: /other\n"
    assert problems_of(text) == [
        "t.yaml:5: log.level: is set twice; the first is in line 5",
        "t.yaml:6: state_directory: is set twice; the first is in line 4",
    ]


def test_key_that_is_not_text_is_refused():
    """A list cannot name a property."""
    assert problems_of(SMALLEST + "? [a, b]\n: 1\n") == ["t.yaml:5: a property's name must be text"]


def test_tagged_value_is_refused():
    """A tag never builds an object, and is not repeated: it may be an unquoted secret."""
    text = SMALLEST + "cloud_storage_secret_key: !hunter2\n"
    assert problems_of(text) == [
        "t.yaml:5: cloud_storage_secret_key: a value that begins with ! must be in quotes"
    ]


@pytest.mark.parametrize("word", ["yes", "on", "1", "'true'", "null", "[true]"])
def test_flag_takes_only_true_and_false(word):
    """YAML 1.1's other words for true are not accepted, so no reader has to know them."""
    (problem,) = problems_of(SMALLEST + f"cloud_storage_enabled: {word}\n")
    assert problem.startswith("t.yaml:5: cloud_storage_enabled: must be true or false, not ")


def test_number_with_a_leading_zero_is_not_octal():
    """010 is neither 8 nor 10: it is refused."""
    (problem,) = problems_of(SMALLEST + "cloud_storage_max_connections: 010\n")
    assert (
        problem == "t.yaml:5: cloud_storage_max_connections: must be a whole number from 1 to 1024, not '010'"
    )


def test_environment_fills_values_of_every_type():
    """A variable may hold text, a number, a flag, a size or part of a path."""
    config = parsed(
        SMALLEST.replace("/srv/state", "${BASE}/state")
        + "cluster_id: ${ID}\nadmin: {port: '${PORT}', enabled: '${ON}'}\n"
        + "retention_local_target_bytes_default: ${SIZE}\nretention_local_target_ms_default: ${TIME}\n",
        BASE="/data",
        ID="12345",
        PORT="0",
        ON="false",
        SIZE="5MiB",
        TIME="1000",
    )
    assert str(config.state_directory) == "/data/state"
    assert (config.cluster_id, config.admin.port, config.admin.enabled) == ("12345", 0, False)
    assert config.retention_local_target_bytes_default == 5 * 2**20
    assert config.retention_local_target_ms_default == 1000


def test_environment_cannot_change_the_structure():
    """A variable's content stays one value, whatever YAML would make of it."""
    config = parsed(
        SMALLEST + "cloud_storage_secret_key: ${KEY}\n", KEY="a: b\ncloud_storage_enabled: true # ${HOME} *x"
    )
    assert config.cloud_storage_secret_key is not None
    assert (
        config.cloud_storage_secret_key.get_secret_value() == "a: b\ncloud_storage_enabled: true # ${HOME} *x"
    )
    assert not config.cloud_storage_enabled


def test_unset_variable_names_the_line_and_nothing_else():
    """The value that could not be filled is not also reported as empty."""
    assert problems_of(SMALLEST + "cloud_storage_bucket: ${NO_SUCH}\n") == [
        "t.yaml:5: cloud_storage_bucket: the environment variable NO_SUCH is not set"
    ]


@pytest.mark.parametrize("text", ["${", "${1A}", "${A:-b}", "${}"])
def test_malformed_substitution_is_refused(text):
    """Nothing that looks like a substitution passes as text by accident."""
    (problem,) = problems_of(SMALLEST + f"cloud_storage_access_key: '{text}'\n", A="a")
    assert problem.startswith(
        "t.yaml:5: cloud_storage_access_key: a variable is written ${ followed by its name"
    )


def test_doubled_dollar_writes_a_literal_brace():
    """A password may hold the two characters of a substitution."""
    config = parsed(SMALLEST + "cloud_storage_access_key: 'a$${B}$c'\n")
    assert config.cloud_storage_access_key == "a${B}$c"


def test_value_from_the_environment_is_not_repeated():
    """A secret in the wrong property does not reach the log."""
    text = SMALLEST + "admin: {port: '${S}'}\nshutdown_timeout_ms: ${S}\ncloud_storage_prefix: ${S}\n"
    found = problems_of(text, S="/hunter2/")
    assert len(found) == 3
    assert all("hunter2" not in problem and "from the environment" in problem for problem in found)
