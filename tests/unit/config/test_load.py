"""Files, single values and unknown names."""

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.config.texts import SMALLEST, TIERED, parsed, problems_of
from tieringd.config import Config, load_config, parse_config
from tieringd.config.naming import (
    NOT_APPLICABLE,
    NOT_APPLICABLE_TO_TOPICS,
    SECTIONS,
    property_names,
)
from tieringd.errors import ConfigError


def fault_of_file(path):
    with pytest.raises(ConfigError) as caught:
        load_config(path, environ={})
    (problem,) = caught.value.problems
    return problem


def test_file_is_loaded_and_its_name_is_in_messages(tmp_path):
    """A good file becomes a Config; a bad line is named with the file's path."""
    path = tmp_path / "t.yaml"
    path.write_text("\ufeff" + SMALLEST, encoding="utf-8")
    assert load_config(path, environ={}).state_directory == Path("/srv/state")
    path.write_text(SMALLEST + "nonsense_here: 1\n")
    assert fault_of_file(path).startswith(f"{path}:5: nonsense_here: unknown property")


def test_file_that_cannot_be_used_says_why(tmp_path):
    """A missing file, a directory, an empty file and bytes that are no text have different errors."""
    assert fault_of_file(tmp_path / "no.yaml") == f"{tmp_path}/no.yaml: this file does not exist"
    assert fault_of_file(tmp_path) == f"{tmp_path}: this is a directory; name the file in it"
    path = tmp_path / "t.yaml"
    path.write_bytes(b"")
    assert fault_of_file(path) == f"{path}: is empty; it needs at least broker and state_directory"
    path.write_bytes(b"a: 1\nb: \xff\n")
    assert fault_of_file(path) == f"{path}:2: this line is not UTF-8 text"


def test_file_that_cannot_be_read_says_why(tmp_path):
    """Any other refusal of the system is passed on in its own words."""
    path = tmp_path / "t.yaml"
    path.symlink_to(path)
    assert fault_of_file(path) == f"{path}: this file cannot be read: {os.strerror(errno.ELOOP)}"


def test_error_counts_its_problems():
    """The error's own text says how many there are; the lines are in `problems`."""
    with pytest.raises(ConfigError, match=r"^t\.yaml has 2 problems\. Nothing was changed"):
        parse_config(SMALLEST + "aaaaa: 1\nbbbbb: 2\n", source="t.yaml", environ={})


def test_all_faults_are_reported_at_once_in_line_order():
    """Faults of the text, of single values and between values come together."""
    text = """\
broker:
  kind: kafka
  log_dirs: [relative]
state_directry: /srv/state
cloud_storage_bucket: ${NO_SUCH}
cloud_storage_initial_backoff_ms: 10MiB
cluster_id: mine
topics:
  orders: {redpanda.remote.write: true, remote.storage.enable: false, local.retention.ms: 5x}
log: {level: loud}
log: {}
"""
    assert problems_of(text) == [
        "t.yaml:1: broker.bootstrap: is required with broker.kind kafka: a list of host:port",
        "t.yaml:3: broker.log_dirs[0]: must be an absolute path; 'relative' does not begin with /",
        "t.yaml:4: state_directry: unknown property; did you mean state_directory?",
        "t.yaml:5: cloud_storage_bucket: the environment variable NO_SUCH is not set",
        (
            "t.yaml:6: cloud_storage_initial_backoff_ms: '10MiB' is a size, and this is a duration: "
            "write for example 30s"
        ),
        "t.yaml:7: cluster_id: remove this line: the broker knows its cluster's id",
        (
            "t.yaml:9: topics[orders].local.retention.ms: '5x': 'x' is not a unit of duration; "
            "use one of ms, s, m, h, d, w"
        ),
        (
            "t.yaml:9: topics[orders].redpanda.remote.write: contradicts remote.storage.enable, "
            "which stands for write and read; remove one of them"
        ),
        "t.yaml:11: log: is set twice; the first is in line 10",
    ]


@pytest.mark.parametrize(
    ("addition", "problem"),
    [
        pytest.param(
            "cloud_storage_buckett: b", "unknown property; did you mean cloud_storage_bucket?", id="top"
        ),
        pytest.param("admin: {prot: 1}", "unknown property; did you mean port?", id="section"),
        pytest.param(
            "topics: {a: {redpanda.remote.wirte: true}}", "did you mean redpanda.remote.write?", id="topic"
        ),
        pytest.param(
            "admin: {zzz: 1}", "unknown property; this section has enabled, host, port", id="few-names"
        ),
        pytest.param(
            "zzz: 1", "unknown property; docs/configuration.md lists all properties", id="many-names"
        ),
        pytest.param(
            "log_dirs: [/a]", "unknown property in this section; it belongs under broker", id="wrong-section"
        ),
        pytest.param(
            "retention.local.target.ms: 1",
            "it belongs under topics, below a topic's name",
            id="topic-property-at-the-top",
        ),
        pytest.param(
            "topics: {a: {cloud_storage_prefix: x}}",
            "it belongs at the top level",
            id="cluster-property-of-topic",
        ),
        pytest.param(
            "topics: {a: {redpanda.remote.recoveri: true}}",
            "did you mean redpanda.remote.recovery?",
            id="near-ignored-topic",
        ),
        pytest.param(
            "log_segment_sise: 1", "unknown property; did you mean log_segment_size?", id="near-ignored"
        ),
        pytest.param("segment.ms: 1", "did you mean log_segment_ms?", id="ignored-topic-property-at-the-top"),
        pytest.param("topics: {a: {log.roll.ms: 1}}", "unknown property", id="ignored-of-a-topic"),
        pytest.param("broker2: {}", "did you mean broker?", id="section-name"),
        pytest.param(
            "rpk: {tune_ballast_file: true}", "write tune_ballast_file, ballast_file_path", id="rpk"
        ),
        pytest.param("redpanda: {}", "write its cluster properties at the top level", id="redpanda"),
        pytest.param("1: x", "docs/configuration.md lists all properties", id="number-as-name"),
    ],
)
def test_unknown_name_is_explained(addition, problem):
    """A typing error, a misplaced property and an unknown one get different answers."""
    (found,) = problems_of(SMALLEST + addition + "\n")
    assert found.startswith("t.yaml:5: ")
    assert problem in found


def test_unknown_name_in_broker_security_is_explained():
    """The innermost section is read as strictly as the outermost."""
    text = SMALLEST.replace("kind: none", "kind: none\n  security: {sasl_pasword: hunter2}")
    assert problems_of(text) == [
        "t.yaml:3: broker.security.sasl_pasword: unknown property; did you mean sasl_password?"
    ]


def test_name_that_is_not_applicable_is_not_also_a_property():
    """A property leaves that table when it takes effect."""
    for place, model in SECTIONS.items():
        is_topic = bool(place) and place[0] == "topics"
        ignored = NOT_APPLICABLE_TO_TOPICS if is_topic else NOT_APPLICABLE
        assert set(ignored).isdisjoint(property_names(model))


@pytest.mark.parametrize(
    ("addition", "message"),
    [
        ("cloud_storage_max_connections: 0", "must be from 1 to 1024, not 0"),
        ("cloud_storage_max_connections: 20.5", "must be a whole number from 1 to 1024, not 20.5"),
        ("cloud_storage_max_connections: true", "must be a whole number from 1 to 1024, not true or false"),
        ("cloud_storage_max_connections: 99999999999999999999", "must be a whole number from 1 to 1024"),
        ("cloud_storage_api_endpoint_port: 65536", "must be from 1 to 65535, not 65536"),
        ("cloud_storage_initial_backoff_ms: 0", "must be from 1ms to 1m, not 0"),
        ("cloud_storage_initial_backoff_ms: 61s", "must be from 1ms to 1m, not '61s'"),
        ("cloud_storage_initial_backoff_ms: -1", "must be from 1ms to 1m, not -1"),
        ("cloud_storage_initial_backoff_ms: 1.5", "must be a duration, such as 30s, not 1.5"),
        ("cloud_storage_initial_backoff_ms: null", "must be a duration, such as 30s, not null"),
        ("cloud_storage_initial_backoff_ms: [1]", "must be a duration, such as 30s, not a list"),
        ("retention_local_target_ms_default: -2", "must be at least 1ms, or -1, not -2"),
        ("retention_local_target_bytes_default: 1h", "'1h' is a duration, and this is a size"),
        ("cloud_storage_backend: s3", "must be one of file, aws, google, azure, plugin, not 's3'"),
        ("cloud_storage_backend: [aws]", "must be one of file, aws, google, azure, plugin, not a list"),
        pytest.param(
            "cloud_storage_credentials_source: iam",
            "must be one of config_file, aws_instance_metadata, sts, gcp_instance_metadata, "
            "azure_vm_instance_metadata, azure_aks_oidc_federation, not 'iam'",
            id="source",
        ),
        ("cloud_storage_azure_container: Archive", "must be 3 to 63 lower-case letters, digits and single"),
        ("cloud_storage_azure_container: a--b", "must be 3 to 63 lower-case letters, digits and single"),
        ("cloud_storage_azure_storage_account: my-account", "must be 3 to 24 lower-case letters and digits"),
        ("cloud_storage_azure_adls_endpoint: https://h", "must be a bare host name"),
        ("cloud_storage_azure_adls_port: 0", "must be from 1 to 65535, not 0"),
        ("cloud_storage_sse: AES256", "must be one of managed, kms, not 'AES256'"),
        ("cloud_storage_storage_class: Very Cool", "must be one word; 'Very Cool' is refused"),
        ("cloud_storage_multipart_part_size_bytes: 1MiB", "must be from 5MiB to 5GiB, not '1MiB'"),
        ("cloud_storage_url_style: PATH", "must be one of virtual_host, path, not 'PATH'"),
        ("cloud_storage_bucket: s3://b", "must be a bucket's bare name; 's3://b' is refused"),
        (
            "cloud_storage_bucket: 123",
            "must be text, not a whole number; put a number or a word like true in",
        ),
        ("cloud_storage_api_endpoint: http://h:9000", "must be a bare host name; the port and TLS have"),
        ("cloud_storage_api_endpoint: 'h:9000'", "must be a bare host name"),
        ("cloud_storage_file_root: archive", "must be an absolute path; 'archive' does not begin with /"),
        ("cloud_storage_file_root: 5", "must be an absolute path, not a whole number"),
        ('cloud_storage_file_root: "/a\\0b"', "must not hold a zero byte"),
        ("cloud_storage_trust_file: ~", "cannot be reset with an empty value or null; remove the line"),
        ("cloud_storage_prefix: /a", "in parts with one slash between them"),
        ("cloud_storage_prefix: a/../b", "in parts with one slash between them"),
        ("cloud_storage_prefix: null", "must be text, not null"),
        ("cluster_id: a/b", "must be 1 to 100 letters, digits, . _ or -; 'a/b' is refused"),
        ("cluster_id: ..", "must be 1 to 100 letters, digits, . _ or -; '..' is refused"),
        ("shutdown_timeout_ms: 2h", "must be from 1ms to 1h, not '2h'"),
        ("admin: 9640", "must be a section with properties below it, not a whole number"),
        ("admin: {host: ''}", "must be a host name or an address"),
        ("topics: [orders]", "must be a section with properties below it, not a list"),
        ("topics: {orders: true}", "must be a section with properties below it, not true or false"),
        ("topics: {'a b': {}}", "a topic's name or pattern holds only"),
        ("topics: {'..': {}}", "a topic's name or pattern holds only"),
        (f"topics: {{{'a' * 250}: {{}}}}", "a topic's name has at most 249 characters"),
        ("topics: {a: {retention.local.target.ms: 0}}", "must be at least 1ms, or -1, not 0"),
        ("topics: {a: {local.retention.bytes: -3}}", "must be at least 0B, or -1, or -2, not -3"),
    ],
)
def test_wrong_value_says_what_is_right(addition, message):
    """Types, units and bounds are checked, and the message ends the search for the right value."""
    (found,) = problems_of(SMALLEST + addition + "\n")
    assert found.startswith("t.yaml:5: ")
    assert message in found


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "kind: none",
            "kind: Kafka",
            "t.yaml:2: broker.kind: must be one of none, kafka, redpanda, not 'Kafka'",
        ),
        ("  kind: none\n", "", "t.yaml:1: broker.kind: is required"),
        ("[/srv/logs]", "[]", "t.yaml:3: broker.log_dirs: must list at least one"),
        ("[/srv/logs]", "/srv/logs", "t.yaml:3: broker.log_dirs: must be a list, one `- item` on each line"),
        ("  log_dirs: [/srv/logs]\n", "", "t.yaml:1: broker.log_dirs: is required"),
        ("state_directory: /srv/state", "", "t.yaml:1: state_directory: is required"),
        ("kind: none", "kind: kafka\n  bootstrap: [h]", "t.yaml:3: broker.bootstrap[0]: must be host:port"),
        ("kind: none", "kind: kafka\n  bootstrap: [h:0]", "t.yaml:3: broker.bootstrap[0]: must be host:port"),
        ("kind: none", "kind: kafka\n  bootstrap: ['h:65536']", "broker.bootstrap[0]: must be host:port"),
        ("kind: none", "kind: none\n  security: {sasl_password: ''}", "sasl_password: must not be empty"),
        ("kind: none", "kind: none\n  security: {sasl_password: 5}", "not a whole number; put it in quotes"),
        ("kind: none", "kind: kafka\n  bootstrap: h:9092", "broker.bootstrap: must be a list"),
    ],
)
def test_wrong_broker_section_says_what_is_right(old, new, expected):
    """The section that every file has is checked like any other value."""
    (found,) = problems_of(SMALLEST.replace(old, new))
    assert expected in found


def test_file_without_a_broker_section_asks_for_one():
    """A missing section is one problem, not one for each property in it."""
    assert problems_of("state_directory: /srv/state\n") == ["t.yaml:1: broker: is required"]


@pytest.mark.parametrize("empty", ["", "''", "null"])
@pytest.mark.parametrize(
    "name",
    [
        "cloud_storage_backend",
        "cloud_storage_file_root",
        "cloud_storage_bucket",
        "cloud_storage_region",
        "cloud_storage_credentials_source",
        "cloud_storage_access_key",
        "cloud_storage_secret_key",
        "cloud_storage_api_endpoint",
        "cloud_storage_api_endpoint_port",
        "cloud_storage_disable_tls",
        "cloud_storage_trust_file",
        "cloud_storage_gcs_credentials_file",
        "cloud_storage_azure_storage_account",
        "cloud_storage_azure_container",
        "cloud_storage_azure_shared_key",
        "cloud_storage_azure_managed_identity_id",
        "cloud_storage_azure_adls_endpoint",
        "cloud_storage_azure_adls_port",
    ],
)
def test_access_property_is_reset_by_removing_its_line(name, empty):
    """An empty value of an access property is a mistake of a template, and never a default."""
    assert problems_of(SMALLEST + f"{name}: {empty}\n") == [
        f"t.yaml:5: {name}: cannot be reset with an empty value or null; remove the line"
    ]


def test_amounts_are_held_in_the_unit_of_their_name():
    """Sizes become bytes and durations milliseconds; -1 and null are no limit."""
    config = parsed(
        SMALLEST
        + "cloud_storage_segment_upload_timeout_ms: 1m30s\n"
        + "retention_local_target_ms_default: -1\nretention_local_target_bytes_default: 1GB\n"
    )
    assert config.cloud_storage_segment_upload_timeout_ms == 90_000
    assert config.retention_local_target_ms_default is None
    assert config.retention_local_target_bytes_default == 10**9
    assert (
        parsed(SMALLEST + "retention_local_target_ms_default: null\n").retention_local_target_ms_default
        is None
    )
    assert parsed(SMALLEST).retention_local_target_ms_default == 86_400_000


def test_empty_section_holds_its_defaults():
    """A section whose lines are all commented out is no fault."""
    assert parsed(SMALLEST + "admin:\nlog:\ntopics:\n") == parsed(
        SMALLEST + "admin: {}\nlog: {}\ntopics: {}\n"
    )


def test_config_cannot_be_changed():
    """The configuration of a service stays as it was."""
    config = parsed(SMALLEST)
    with pytest.raises(ValueError, match="frozen"):
        config.cloud_storage_enabled = True


def test_secrets_are_in_no_repr_dump_or_error():
    """Neither a good nor a bad configuration shows a secret."""
    secured = TIERED.replace("kind: none", "kind: kafka\n  bootstrap: [h:9092]\n  security: {SECURITY}")
    good = secured.replace(
        "{SECURITY}", "{protocol: SASL_SSL, sasl_username: u, sasl_password: hunter2}"
    ).replace("backend: file", "backend: aws")
    good += "cloud_storage_bucket: bbb\ncloud_storage_region: r\ncloud_storage_access_key: k\n"
    good += "cloud_storage_secret_key: hunter2\n"
    config = parsed(good)
    assert config.cloud_storage_secret_key is not None
    assert config.cloud_storage_secret_key.get_secret_value() == "hunter2"
    shown = [repr(config), str(config), config.model_dump_json(), repr(config.model_dump()), *config.warnings]
    for bad in ("hunter2: 1", "[hunter2]", "{hunter2: hunter2}", "!hunter2", "*hunter2", "'hunter2"):
        with pytest.raises(ConfigError) as caught:
            parsed(good.replace("secret_key: hunter2", f"secret_key: {bad}").replace(": hunter2}", ": x}"))
        shown += [str(caught.value), *caught.value.problems]
        assert caught.value.__cause__ is None
        assert caught.value.__context__ is None
    assert not any("hunter2" in text for text in shown)


_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["/", "${A}", "1s"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from([*Config.model_fields, "kind", "log_dirs", "security", "a*", "segment.ms"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=10,
)


@given(st.dictionaries(st.sampled_from([*Config.model_fields, "zzz", "log.roll.ms"]), _VALUES, max_size=8))
@settings(deadline=None)
def test_any_yaml_is_a_config_or_a_config_error_with_problems(document):
    """A list of problems in the file's own lines comes of any mixture of values, or a configuration."""
    import yaml  # noqa: PLC0415 the one test that writes YAML

    text = yaml.safe_dump(document)
    try:
        parse_config(text, source="t.yaml", environ={"A": "/a"})
    except ConfigError as error:
        assert error.problems  # noqa: PT017 both outcomes are right
        assert all(problem.startswith("t.yaml:") for problem in error.problems)  # noqa: PT017


@given(st.text(max_size=60))
@settings(deadline=None)
def test_any_text_is_a_config_or_a_config_error(text):
    """No text, valid YAML or not, raises anything else."""
    with pytest.raises(ConfigError):
        parse_config(text, source="t.yaml", environ={})
