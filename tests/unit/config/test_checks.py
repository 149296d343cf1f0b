"""The rules between properties."""

from pathlib import Path

import pytest

from tests.unit.config.texts import SMALLEST, TIERED, parsed, problems_of

KAFKA = SMALLEST.replace("kind: none", "kind: kafka\n  bootstrap: [localhost:9092]")
"""Five lines."""
AWS = SMALLEST + (
    "cloud_storage_enabled: true\ncloud_storage_enable_remote_write: true\n"
    "cloud_storage_bucket: bbb\ncloud_storage_region: r\n"
    "cloud_storage_access_key: k\ncloud_storage_secret_key: s\n"
)
"""Ten lines."""

KAFKA_TIERED = TIERED.replace("kind: none", "kind: kafka\n  bootstrap: [localhost:9092]")


def without(text, name):
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith(f"{name}:"))


def test_smallest_configurations_are_valid_and_without_warnings():
    """A directory, a Kafka broker, a file store and AWS need no more than this."""
    for text in (SMALLEST, KAFKA, TIERED, AWS):
        assert parsed(text).warnings == ()


@pytest.mark.parametrize(
    ("security", "problem"),
    [
        ("{protocol: SASL_SSL, sasl_username: u}", "sasl_password: is required with protocol SASL_SSL"),
        (
            "{protocol: SASL_PLAINTEXT, sasl_password: p}",
            "sasl_username: is required with protocol SASL_PLAINTEXT",
        ),
        ("{protocol: SSL, sasl_username: u}", "sasl_username: contradicts protocol SSL, which has no login"),
        ("{sasl_password: p}", "sasl_password: contradicts protocol PLAINTEXT, which has no login"),
        ("{ssl_ca_file: /ca}", "ssl_ca_file: contradicts protocol PLAINTEXT, which has no TLS"),
        ("{protocol: SSL, ssl_key_file: /k}", "ssl_key_file: needs ssl_cert_file as well"),
    ],
)
def test_security_is_complete_and_of_one_mind(security, problem):
    """The settings that the protocol needs are required, and those that it cannot use are refused."""
    text = KAFKA.replace("kind: kafka", f"kind: kafka\n  security: {security}")
    assert problems_of(text) == [f"t.yaml:3: broker.security.{problem}"]


def test_security_that_is_complete_is_accepted():
    """A certificate may hold its own key, and TLS may go with a login."""
    for security in (
        "{protocol: SASL_SSL, sasl_username: u, sasl_password: p, ssl_ca_file: /ca}",
        "{protocol: SSL, ssl_cert_file: /c, ssl_key_file: /k}",
        "{protocol: SSL, ssl_cert_file: /c}",
    ):
        assert parsed(KAFKA.replace("kind: kafka", f"kind: kafka\n  security: {security}"))


@pytest.mark.parametrize(
    ("name", "value"),
    [("bootstrap", "[h:9092]"), ("node_id", "0"), ("security", "{protocol: SSL}")],
)
def test_no_broker_refuses_what_only_a_broker_can_use(name, value):
    """Properties of a connection are refused with kind none: there is nothing to connect to."""
    assert problems_of(SMALLEST.replace("kind: none", f"kind: none\n  {name}: {value}")) == [
        f"t.yaml:3: broker.{name}: remove this line: with broker.kind none there is no broker to connect to"
    ]


def test_kafka_broker_needs_bootstrap_and_knows_its_cluster():
    """A broker is reached by an address, and its cluster's id is not ours to choose."""
    assert problems_of(SMALLEST.replace("none", "kafka") + "cluster_id: local\n") == [
        "t.yaml:1: broker.bootstrap: is required with broker.kind kafka: a list of host:port",
        "t.yaml:5: cluster_id: remove this line: the broker knows its cluster's id",
    ]
    assert parsed(SMALLEST + "cluster_id: mine\n").cluster_id == "mine"


def test_parts_of_redpandas_segments_are_not_promised():
    """An interval that would have no effect is refused with a remedy; null is as good as absent."""
    redpanda = SMALLEST.replace("kind: none", "kind: redpanda\n  bootstrap: [h:9092]")
    name = "cloud_storage_segment_max_upload_interval_sec"
    (problem,) = problems_of(redpanda + f"{name}: 1h\n")
    assert problem.startswith(
        f"t.yaml:6: {name}: remove this line: a Redpanda log is uploaded in whole segments"
    )
    parsed(redpanda + f"{name}: null\n")


@pytest.mark.parametrize("inside", ["/srv/logs", "/srv/logs/state", "/srv/logs/../logs/a/b"])
def test_own_directories_stay_out_of_the_log_directories(inside):
    """Kafka does not start when it finds a directory that it does not know."""
    (problem,) = problems_of(SMALLEST.replace("/srv/state", inside))
    assert problem.startswith("t.yaml:4: state_directory: ")
    assert "is inside the log directory /srv/logs: Kafka does not start" in problem
    (problem,) = problems_of(TIERED.replace("/srv/archive", inside))
    assert problem.startswith("t.yaml:8: cloud_storage_file_root: ")


@pytest.mark.parametrize("inside", ["/srv/logs", "/srv/logs/pins", "/srv/logs/../logs/a/b"])
def test_pin_directory_stays_out_of_the_log_directories(inside):
    """Kafka does not start when it finds the pins among its partitions."""
    text = KAFKA.replace("kind: kafka", f"kind: kafka\n  pin_directory: {inside}")
    (problem,) = problems_of(text)
    assert problem.startswith("t.yaml:3: broker.pin_directory: ")
    assert "is inside the log directory /srv/logs: Kafka does not start" in problem
    for beside in ("/srv/logs-pins", "/srv"):
        config = parsed(KAFKA.replace("kind: kafka", f"kind: kafka\n  pin_directory: {beside}"))
        assert (config.broker.pin_directory, config.warnings) == (Path(beside), ())


def test_pin_directory_is_not_part_of_the_archive():
    """A listing of the file store must not walk the pins."""
    text = TIERED.replace("kind: none", "kind: kafka\n  bootstrap: [h:1]\n  pin_directory: /srv/archive/pins")
    assert problems_of(text) == [
        (
            "t.yaml:10: cloud_storage_file_root: /srv/archive holds /srv/archive/pins; "
            "it must hold nothing but the archive"
        )
    ]


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [("pin_segments", "true", 5), ("pin_segments", "false", 5), ("pin_max_bytes", "1GiB", 5)],
)
def test_pins_have_no_effect_without_a_broker(name, value, line):
    """Pins have no use if no broker deletes segments, and setting them is a warning."""
    assert parsed(SMALLEST + f"{name}: {value}\n").warnings == (
        f"t.yaml:{line}: {name}: has no effect with broker.kind none: only this daemon deletes segments",
    )


def test_pin_directory_has_no_effect_without_a_broker():
    """The place for pins is as idle as the pins."""
    text = SMALLEST.replace("kind: none", "kind: none\n  pin_directory: /srv/pins")
    assert parsed(text).warnings == (
        (
            "t.yaml:3: broker.pin_directory: has no effect with broker.kind none: "
            "only this daemon deletes segments"
        ),
    )


def test_pin_settings_have_no_effect_while_pins_are_off():
    """A budget and a place for pins that are not made are hardly meant; switching off alone is."""
    off = KAFKA + "pin_segments: false\n"
    assert parsed(off).warnings == ()
    text = off.replace("kind: kafka", "kind: kafka\n  pin_directory: /srv/pins") + "pin_max_bytes: 5GiB\n"
    assert parsed(text).warnings == (
        "t.yaml:3: broker.pin_directory: has no effect while pin_segments is false",
        "t.yaml:8: pin_max_bytes: has no effect while pin_segments is false",
    )
    on = text.replace("pin_segments: false", "pin_segments: true")
    assert parsed(on).warnings == ()


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        pytest.param(
            "min_shares: 600\ncloud_storage_upload_ctrl_max_shares: 500",
            "t.yaml:5: cloud_storage_upload_ctrl_min_shares: "
            "600 is more than cloud_storage_upload_ctrl_max_shares, which is 500",
            id="both",
        ),
        pytest.param(
            "max_shares: 99",
            "t.yaml:1: cloud_storage_upload_ctrl_min_shares: "
            "100 is more than cloud_storage_upload_ctrl_max_shares, which is 99",
            id="below the default",
        ),
    ],
)
def test_fewest_shares_are_not_more_than_the_most(lines, problem):
    """The pace has a lower and an upper bound, and they are not swapped."""
    assert problems_of(SMALLEST + f"cloud_storage_upload_ctrl_{lines}\n") == [problem]


def test_fewest_shares_may_be_the_most():
    """One pace whatever the backlog is a choice."""
    config = parsed(SMALLEST + "cloud_storage_upload_ctrl_max_shares: 100\n")
    assert (config.cloud_storage_upload_ctrl_min_shares, config.cloud_storage_upload_ctrl_max_shares) == (
        100,
        100,
    )
    assert config.warnings == ()


def test_directory_beside_a_log_directory_is_not_inside_it():
    """A shared beginning of two names is no nesting."""
    assert parsed(
        TIERED.replace("/srv/state", "/srv/logs-state").replace("/srv/archive", "/srv/logs.archive")
    )


def test_symbolic_links_do_not_hide_nesting(tmp_path):
    """Directories are compared where they are, not by what they are called."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "alias").symlink_to(tmp_path / "logs")
    text = SMALLEST.replace("/srv/logs", f"{tmp_path}/logs")
    (problem,) = problems_of(text.replace("/srv/state", f"{tmp_path}/alias/state"))
    assert "is inside the log directory" in problem
    (problem,) = problems_of(text.replace("/logs]", f"/logs, {tmp_path}/alias]"))
    assert problem.startswith("t.yaml:3: broker.log_dirs[1]: ")


def test_log_directory_is_listed_once():
    """Reading a directory twice would archive each partition twice."""
    assert problems_of(SMALLEST.replace("[/srv/logs]", "[/srv/logs, /other, /srv/./logs/]")) == [
        "t.yaml:3: broker.log_dirs[2]: /srv/logs is the same directory as /srv/logs, which is listed already"
    ]


@pytest.mark.parametrize(
    ("root", "held"),
    [("/srv", "/srv/state"), ("/srv", "/srv/logs"), ("/srv/state", "/srv/state"), ("/", "/srv/logs")],
)
def test_file_store_holds_nothing_but_the_archive(root, held):
    """A listing of the store must not walk the broker's files or ours."""
    problems = problems_of(TIERED.replace("/srv/archive", root))
    assert (
        f"t.yaml:8: cloud_storage_file_root: {root} holds {held}; it must hold nothing but the archive"
        in problems
    )


def test_file_store_may_be_inside_the_state_directory():
    """A demo keeps everything in one place."""
    assert parsed(TIERED.replace("/srv/archive", "/srv/state/archive"))


@pytest.mark.parametrize(
    ("write", "read", "problems"), [(True, True, 0), (False, True, 1), (False, False, 2)]
)
def test_kafka_and_redpanda_names_agree_within_one_entry(write, read, problems):
    """remote.storage.enable stands for write and read; a different redpanda.remote.* is refused."""
    text = SMALLEST + (
        f"topics:\n  a:\n    remote.storage.enable: true\n    redpanda.remote.write: {str(write).lower()}\n"
        f"    redpanda.remote.read: {str(read).lower()}\n"
    )
    if not problems:
        assert parsed(text)
        return
    found = problems_of(text)
    assert len(found) == problems
    assert all("contradicts remote.storage.enable" in problem for problem in found)


def test_tiering_needs_a_backend():
    """Nothing to infer from is one problem that names the choices."""
    text = without(without(TIERED, "cloud_storage_backend"), "cloud_storage_file_root")
    assert problems_of(text) == [
        (
            "t.yaml:1: cloud_storage_backend: is required: set file, aws, google, azure or plugin, or "
            "let it be inferred from a bucket with its region, an endpoint, or a storage account"
        )
    ]


def test_plugin_backend_needs_a_name():
    """The other settings of a plugin are its own affair."""
    text = TIERED.replace("cloud_storage_backend: file", "cloud_storage_backend: plugin")
    (problem,) = problems_of(text)
    assert "cloud_storage_plugin: is required for the plugin backend" in problem
    named = parsed(text + "cloud_storage_plugin: mine\n")
    assert (named.store_kind, named.cloud_storage_plugin) == ("plugin", "mine")


def test_file_backend_needs_a_root():
    """The directory that stands in for the bucket has no default."""
    assert problems_of(without(TIERED, "cloud_storage_file_root")) == [
        "t.yaml:1: cloud_storage_file_root: is required for the file backend"
    ]


def test_endpoint_makes_the_region_optional():
    """An S3-compatible store often has no regions."""
    config = parsed(without(AWS, "cloud_storage_region") + "cloud_storage_api_endpoint: s3.local\n")
    assert config.backend == "aws"
    assert problems_of(without(AWS, "cloud_storage_region") + "cloud_storage_backend: aws\n") == [
        "t.yaml:1: cloud_storage_region: is required for the aws backend"
    ]


def test_nothing_is_required_of_the_store_while_tiering_is_off():
    """A configuration may be prepared before it is switched on."""
    assert parsed(SMALLEST + "cloud_storage_backend: aws\ncloud_storage_bucket: bbb\n").warnings == ()


@pytest.mark.parametrize(
    ("text", "backend", "url_style", "endpoint_url"),
    [
        pytest.param(TIERED, "file", "virtual_host", None, id="file"),
        pytest.param(AWS, "aws", "virtual_host", None, id="aws"),
        pytest.param(AWS + "cloud_storage_api_endpoint: h\n", "aws", "path", "https://h:443", id="endpoint"),
        pytest.param(
            AWS + "cloud_storage_api_endpoint: h\ncloud_storage_url_style: virtual_host\n"
            "cloud_storage_disable_tls: true\ncloud_storage_api_endpoint_port: 9000\n",
            "aws",
            "virtual_host",
            "http://h:9000",
            id="plain-http",
        ),
        pytest.param(AWS + "cloud_storage_url_style: path\n", "aws", "path", None, id="style-given"),
        pytest.param(SMALLEST, None, "virtual_host", None, id="nothing"),
        pytest.param(SMALLEST + "cloud_storage_bucket: bbb\n", None, "virtual_host", None, id="bucket-alone"),
    ],
)
def test_what_is_not_said_of_the_store_is_inferred(text, backend, url_style, endpoint_url):
    """The backend, the style of its URLs and its address follow from what is given."""
    config = parsed(text)
    assert (config.backend, config.url_style, config.endpoint_url) == (backend, url_style, endpoint_url)


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        pytest.param(
            SMALLEST + "cloud_storage_enable_remote_write: true\n",
            "t.yaml:5: cloud_storage_enable_remote_write: has no effect while cloud_storage_enabled is false",
            id="write-while-off",
        ),
        pytest.param(
            SMALLEST + "cloud_storage_enable_remote_read: true\n",
            "t.yaml:5: cloud_storage_enable_remote_read: has no effect while cloud_storage_enabled is false",
            id="read-while-off",
        ),
        pytest.param(
            SMALLEST + "topics:\n  a: {redpanda.remote.write: true}\n",
            "t.yaml:6: topics[a].redpanda.remote.write: has no effect while cloud_storage_enabled is false",
            id="topic-while-off",
        ),
        pytest.param(
            SMALLEST + "topics:\n  a: {remote.storage.enable: true}\n",
            "t.yaml:6: topics[a].remote.storage.enable: has no effect while cloud_storage_enabled is false",
            id="kafka-topic-while-off",
        ),
        pytest.param(
            TIERED + "cloud_storage_region: r\n",
            "t.yaml:9: cloud_storage_region: has no effect with the file backend",
            id="region-of-a-directory",
        ),
        pytest.param(
            AWS + "cloud_storage_file_root: /a\n",
            "t.yaml:11: cloud_storage_file_root: has no effect with the aws backend",
            id="directory-of-aws",
        ),
        pytest.param(
            AWS + "cloud_storage_api_endpoint: h\ncloud_storage_disable_tls: true\n",
            "t.yaml:12: cloud_storage_disable_tls: plain HTTP uses port 443 here; "
            "if that is not intended, set cloud_storage_api_endpoint_port",
            id="http-on-443",
        ),
        pytest.param(
            without(TIERED, "cloud_storage_enable_remote_write"),
            "t.yaml:5: cloud_storage_enabled: nothing will be archived: "
            "set cloud_storage_enable_remote_write, or redpanda.remote.write for a topic",
            id="nothing-archived",
        ),
    ],
)
def test_what_is_hardly_meant_is_a_warning(text, warning):
    """A doubtful configuration works, and says so."""
    assert parsed(text).warnings == (warning,)


@pytest.mark.parametrize(
    ("text", "is_warned"),
    [
        pytest.param(SMALLEST, True, id="tiering-off"),
        pytest.param(SMALLEST + "cloud_storage_enable_remote_write: true\n", True, id="write-while-off"),
        pytest.param(without(KAFKA_TIERED, "cloud_storage_enable_remote_write"), True, id="write-off"),
        pytest.param(KAFKA_TIERED, False, id="write-on"),
    ],
)
def test_keeping_everything_without_remote_write_is_a_warning(text, is_warned):
    """Records without limit fill the local disks when nothing takes them away."""
    line = text.count("\n") + 1
    words = f"t.yaml:{line}: log_retention_ms: keeps records without limit, and without remote write"
    found = parsed(text + "log_retention_ms: -1\n").warnings
    assert any(warning.startswith(words) for warning in found) is is_warned
    assert not any("log_retention_ms" in warning for warning in parsed(text).warnings)


@pytest.mark.parametrize("value", ["0", "-2", "soon"])
@pytest.mark.parametrize(
    "name", ["log_retention_ms", "delete_retention_ms", "log.retention.ms", "retention_bytes"]
)
def test_limit_of_total_retention_that_is_none_is_refused(name, value):
    """A retention that keeps nothing at all is taken for a mistake."""
    (problem,) = problems_of(SMALLEST + f"{name}: {value}\n")
    assert problem.startswith(f"t.yaml:5: {name}: ")


@pytest.mark.parametrize(
    ("holds", "shadowed"),
    [
        ("delete_retention_ms", "log_retention_ms"),
        ("log.retention.ms", "log_retention_ms"),
        ("log.retention.ms", "delete_retention_ms"),
        ("log.retention.bytes", "retention_bytes"),
    ],
)
def test_two_names_of_one_limit_are_a_warning(holds, shadowed):
    """The one that holds is named, and the other is to be removed."""
    warnings = parsed(TIERED + f"{shadowed}: 5\n{holds}: 7\n").warnings
    line = TIERED.count("\n") + 1
    assert warnings == (
        f"t.yaml:{line}: {shadowed}: has no effect, because {holds} takes precedence; remove one of them",
    )


@pytest.mark.parametrize(
    ("holds", "shadowed"),
    [
        ("retention.ms", "remote.log.retention.minutes"),
        ("retention.bytes", "remote.log.retention.bytes"),
        ("local.retention.ms", "retention.local.target.ms"),
        ("local.retention.bytes", "retention.local.target.bytes"),
    ],
)
def test_two_names_of_one_limit_of_a_topic_are_a_warning(holds, shadowed):
    """Two names of one limit are a warning for a topic, as for the cluster."""
    (warning,) = parsed(TIERED + f"topics: {{a: {{{shadowed}: 5, {holds}: 7}}}}\n").warnings
    assert warning.endswith(
        f"topics[a].{shadowed}: has no effect, because {holds} takes precedence; remove one of them"
    )


@pytest.mark.parametrize("name", ["log_retention_ms", "log.retention.bytes", "retention_bytes"])
def test_limit_that_a_kafka_broker_says_itself_is_a_warning(name):
    """DescribeConfigs has a value for every topic, so the cluster's is never asked for."""
    (warning,) = parsed(KAFKA_TIERED + f"{name}: 7\n").warnings
    assert f"{name}: has no effect with broker.kind kafka" in warning
    assert parsed(TIERED + f"{name}: 7\n").warnings == ()


def test_broker_or_a_topic_may_switch_archiving_on():
    """The cluster's value need not be true for something to be archived."""
    off = without(TIERED, "cloud_storage_enable_remote_write")
    assert parsed(off + "topics: {a: {remote.storage.enable: true}}\n").warnings == ()
    assert parsed(off.replace("kind: none", "kind: kafka\n  bootstrap: [h:1]")).warnings == ()


def test_finding_that_rests_on_a_faulty_value_is_not_shown():
    """One mistake is one problem."""
    (problem,) = problems_of(TIERED.replace("backend: file", "backend: fiel"))
    assert problem.startswith("t.yaml:7: cloud_storage_backend: must be one of")
    (problem,) = problems_of(TIERED.replace("file_root:", "file_rot:"))
    assert (
        problem == "t.yaml:8: cloud_storage_file_rot: unknown property; did you mean cloud_storage_file_root?"
    )
    (problem,) = problems_of(AWS.replace("secret_key: s", "secret_key: ${UNSET}"))
    assert problem.endswith("UNSET is not set")
