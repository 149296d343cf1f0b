"""Three clouds: the documents' examples, what is inferred from them, and what each way in needs."""

import pytest

from tests.unit.config.texts import EXAMPLES, ON, TIERED, parsed, problems_of


def example(name, addition=""):
    return parsed(ON + EXAMPLES[name] + addition, SECRET="s3cr3t")


def faults(text):
    return problems_of(ON + text, SECRET="s3cr3t")


@pytest.mark.parametrize(
    ("name", "backend", "store", "endpoint"),
    [
        ("aws keys", "aws", "s3", None),
        ("aws role", "aws", "s3", None),
        ("aws web identity", "aws", "s3", None),
        ("gcs hmac", "google", "s3", "https://storage.googleapis.com:443"),
        ("gcs metadata", "google", "gcs", "https://storage.googleapis.com:443"),
        ("gcs service account", "google", "gcs", None),
        ("azure key", "azure", "azure", None),
        ("azure identity", "azure", "azure", None),
        ("azure workload identity", "azure", "azure", None),
        ("azure hierarchical", "azure", "azure", None),
    ],
)
def test_example_of_the_documents_runs_as_written(name, backend, store, endpoint):
    """The backend and the store that speaks to it follow from what the example holds."""
    config = example(name)
    assert (config.warnings, config.notes) == ((), ())
    assert (config.backend, config.store_kind, config.endpoint_url) == (backend, store, endpoint)
    assert config.backend_inferred_from
    named = example(name, f"cloud_storage_backend: {backend}\n")
    assert (named.backend, named.store_kind, named.backend_inferred_from) == (backend, store, ())


@pytest.mark.parametrize("name", EXAMPLES)
def test_each_line_of_an_example_is_needed(name):
    """An example without any one of its lines is refused, or means something else."""
    whole = example(name)
    optional = {
        "cloud_storage_azure_managed_identity_id",
        "cloud_storage_azure_adls_port",
        "cloud_storage_azure_adls_endpoint",
    }
    for line in EXAMPLES[name].splitlines(keepends=True):
        rest = EXAMPLES[name].replace(line, "")
        if line.partition(":")[0] in optional:
            assert parsed(ON + rest, SECRET="s").backend == whole.backend
        elif name in ("gcs metadata", "gcs hmac") and "api_endpoint" in line:
            continue
        else:
            assert faults(rest)


def test_metadata_of_google_alone_means_google():
    """The endpoint of the example is the default as well."""
    config = parsed(
        ON + EXAMPLES["gcs metadata"].replace("cloud_storage_api_endpoint: storage.googleapis.com\n", "")
    )
    assert (config.backend, config.store_kind, config.endpoint_url) == ("google", "gcs", None)
    assert config.backend_inferred_from == ("cloud_storage_credentials_source",)


def test_hmac_keys_know_the_endpoint_of_google():
    """A named backend needs no endpoint: keys go to the compatible interface of GCS itself."""
    text = EXAMPLES["gcs hmac"].replace(
        "cloud_storage_api_endpoint: storage.googleapis.com", "cloud_storage_backend: google"
    )
    config = parsed(ON + text, SECRET="s")
    assert (config.store_kind, config.endpoint_url) == ("s3", "https://storage.googleapis.com:443")


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("", ["bucket", "access_key", "secret_key", "region"]),
        ("cloud_storage_api_endpoint: s3.local\n", ["bucket", "access_key", "secret_key"]),
        ("cloud_storage_credentials_source: aws_instance_metadata\n", ["bucket", "region"]),
        ("cloud_storage_credentials_source: sts\n", ["bucket", "region"]),
    ],
)
def test_aws_needs_a_bucket_and_keys_or_a_role(lines, expected):
    """Each missing property is named, and a role takes the place of keys."""
    found = faults("cloud_storage_backend: aws\n" + lines)
    assert [line.split(": ")[1] for line in found] == [f"cloud_storage_{name}" for name in expected]
    assert all("is required for the aws backend" in line for line in found)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("", ["bucket", "access_key", "secret_key", "region"]),
        (
            "cloud_storage_api_endpoint: storage.googleapis.com\n",
            ["bucket", "access_key", "secret_key", "region"],
        ),
        ("cloud_storage_api_endpoint: localhost\n", ["bucket", "access_key", "secret_key"]),
        ("cloud_storage_credentials_source: gcp_instance_metadata\n", ["bucket", "region"]),
        ("cloud_storage_gcs_credentials_file: /a.json\n", ["bucket", "region"]),
    ],
)
def test_google_needs_a_bucket_and_one_way_in(lines, expected):
    """HMAC keys, a service account or the machine's own: one of the three."""
    found = faults("cloud_storage_backend: google\n" + lines)
    assert [line.split(": ")[1] for line in found] == [f"cloud_storage_{name}" for name in expected]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("", ["storage_account", "container", "shared_key"]),
        ("cloud_storage_credentials_source: azure_vm_instance_metadata\n", ["storage_account", "container"]),
        ("cloud_storage_credentials_source: azure_aks_oidc_federation\n", ["storage_account", "container"]),
    ],
)
def test_azure_needs_account_and_container_and_key_or_identity(lines, expected):
    """A bucket or a region is nothing to Azure."""
    found = faults("cloud_storage_backend: azure\n" + lines)
    assert [line.split(": ")[1] for line in found] == [f"cloud_storage_azure_{name}" for name in expected]


@pytest.mark.parametrize("source", ["azure_vm_instance_metadata", "azure_aks_oidc_federation"])
def test_identity_of_azure_alone_means_azure(source):
    """The identity names the cloud, so the problems have that cloud's property names."""
    found = faults(f"cloud_storage_credentials_source: {source}\n")
    assert [line.split(": ")[1] for line in found] == [
        "cloud_storage_azure_storage_account",
        "cloud_storage_azure_container",
    ]


@pytest.mark.parametrize("backend", ["aws", "google", "azure"])
@pytest.mark.parametrize(
    ("source", "of"),
    [
        ("aws_instance_metadata", "aws"),
        ("sts", "aws"),
        ("gcp_instance_metadata", "google"),
        ("azure_vm_instance_metadata", "azure"),
        ("azure_aks_oidc_federation", "azure"),
    ],
)
def test_source_of_another_cloud_is_refused(backend, source, of):
    """No cloud takes another one's identities; it is the one fault that is shown then."""
    found = faults(f"cloud_storage_backend: {backend}\ncloud_storage_credentials_source: {source}\n")
    refused = [
        line for line in found if line.startswith("t.yaml:8: cloud_storage_credentials_source: must be")
    ]
    assert len(refused) == (backend != of)
    if refused:
        assert found == refused
        assert f"with the {backend} backend, not {source}" in found[0]


def test_two_ways_into_google_contradict():
    """The error names both ways, because it is ambiguous which of them was meant."""
    found = faults(EXAMPLES["gcs hmac"] + "cloud_storage_gcs_credentials_file: /a.json\n")
    assert [line.split(": ", 2)[1] for line in found] == [
        "cloud_storage_access_key",
        "cloud_storage_secret_key",
    ]
    assert all("contradicts cloud_storage_gcs_credentials_file" in line for line in found)


@pytest.mark.parametrize(
    ("name", "line", "words"),
    [
        (
            "aws role",
            "cloud_storage_access_key: k",
            "while cloud_storage_credentials_source is aws_instance_metadata",
        ),
        ("aws web identity", "cloud_storage_secret_key: k", "while cloud_storage_credentials_source is sts"),
        ("gcs metadata", "cloud_storage_gcs_credentials_file: /a", "is gcp_instance_metadata"),
        ("azure identity", "cloud_storage_azure_shared_key: k", "is azure_vm_instance_metadata"),
        ("azure key", "cloud_storage_azure_managed_identity_id: k", "is config_file"),
        ("azure key", "cloud_storage_bucket: bbb", "with the azure backend"),
        ("azure key", "cloud_storage_access_key: k", "with the azure backend"),
        ("azure key", "cloud_storage_azure_adls_port: 1", "without cloud_storage_azure_adls_endpoint"),
        ("gcs hmac", "cloud_storage_azure_shared_key: k", "with the google backend"),
        ("aws keys", "cloud_storage_file_root: /a", "with the aws backend"),
        ("azure key", "cloud_storage_sse: managed", "always encrypts with keys of its own"),
        ("gcs metadata", "cloud_storage_sse: managed", "always encrypts with keys of its own"),
        ("gcs metadata", "cloud_storage_multipart_part_size_bytes: 5MiB", "takes every object in one piece"),
    ],
)
def test_property_that_the_way_in_does_not_read_is_a_warning(name, line, words):
    """A key that is left behind looks as if it were in use."""
    config = parsed(
        ON + f"cloud_storage_backend: {example(name).backend}\n" + EXAMPLES[name] + line, SECRET="s"
    )
    (warning,) = config.warnings
    assert f": {line.partition(':')[0]}: has no effect" in warning
    assert warning.endswith(words)


def test_endpoint_goes_before_that_of_the_hierarchical_namespace():
    """Only one of them can be the account's host."""
    (warning,) = example("azure hierarchical", "cloud_storage_api_endpoint: h\n").warnings
    assert (
        ": cloud_storage_azure_adls_endpoint: has no effect, because cloud_storage_api_endpoint takes "
        "precedence" in warning
    )


def test_file_backend_warns_of_what_only_a_network_has():
    """A directory has no endpoint, no classes and no parts."""
    lines = [
        "cloud_storage_url_style: path",
        "cloud_storage_sse: managed",
        "cloud_storage_storage_class: COLD",
        "cloud_storage_multipart_part_size_bytes: 5MiB",
    ]
    found = parsed(TIERED + "\n".join(lines)).warnings
    assert found == tuple(
        f"t.yaml:{number}: {line.partition(':')[0]}: has no effect with the file backend"
        for number, line in enumerate(lines, start=9)
    )


@pytest.mark.parametrize(
    ("lines", "url"),
    [
        ("", "https://archiveaccount.blob.core.windows.net:443"),
        (
            "cloud_storage_disable_tls: true\ncloud_storage_api_endpoint_port: 80\n",
            "http://archiveaccount.blob.core.windows.net:80",
        ),
        (
            "cloud_storage_api_endpoint: archiveaccount.blob.core.cloudapi.de\n",
            "https://archiveaccount.blob.core.cloudapi.de:443",
        ),
        pytest.param(
            "cloud_storage_api_endpoint: 127.0.0.1\ncloud_storage_disable_tls: true\n"
            "cloud_storage_api_endpoint_port: 10000\n",
            "http://127.0.0.1:10000/archiveaccount",
            id="emulator",
        ),
        (
            "cloud_storage_api_endpoint: own.example.com\ncloud_storage_url_style: virtual_host\n",
            "https://own.example.com:443",
        ),
    ],
)
def test_azure_account_is_in_the_host_or_in_the_path(lines, url):
    """Azure's own hosts are named after the account; any other endpoint has it in the path."""
    assert example("azure key", lines).azure_account_url == url


@pytest.mark.parametrize(
    ("lines", "style", "url"),
    [
        ("", "path", "https://adls.example.com:8443/archiveaccount"),
        ("cloud_storage_url_style: virtual_host\n", "virtual_host", "https://adls.example.com:8443"),
        (
            "cloud_storage_api_endpoint: archiveaccount.example.com\n",
            "virtual_host",
            "https://archiveaccount.example.com:443",
        ),
    ],
)
def test_hierarchical_namespace_has_an_endpoint_of_its_own(lines, style, url):
    """The endpoint is the account's host if no other is set, by the same rule for the path."""
    config = example("azure hierarchical", lines)
    assert (config.url_style, config.azure_account_url) == (style, url)


def test_hierarchical_namespace_is_at_port_443_unless_it_says_otherwise():
    """An endpoint that is named after the account needs no path."""
    config = example("azure key", "cloud_storage_azure_adls_endpoint: archiveaccount.dfs.example.com\n")
    assert config.azure_account_url == "https://archiveaccount.dfs.example.com:443"


@pytest.mark.parametrize(
    ("name", "lines", "problem"),
    [
        ("aws keys", "cloud_storage_sse: kms\n", None),
        ("aws keys", "cloud_storage_sse: kms\ncloud_storage_sse_kms_key_id: alias/a\n", None),
        ("aws keys", "cloud_storage_sse: managed\n", None),
        ("gcs metadata", "cloud_storage_sse: kms\ncloud_storage_sse_kms_key_id: projects/p\n", None),
        (
            "aws keys",
            "cloud_storage_sse_kms_key_id: k\n",
            "kms_key_id: needs cloud_storage_sse: kms as well",
        ),
        (
            "aws keys",
            "cloud_storage_sse: managed\ncloud_storage_sse_kms_key_id: k\n",
            "needs cloud_storage_sse",
        ),
        ("gcs metadata", "cloud_storage_sse: kms\n", "kms_key_id: is required for the google backend"),
        (
            "azure key",
            "cloud_storage_sse: kms\ncloud_storage_sse_kms_key_id: k\n",
            "cloud_storage_sse: Azure takes no key with a request",
        ),
        (
            "azure key",
            "cloud_storage_multipart_threshold_bytes: 5GiB\n",
            "threshold_bytes: Azure takes at most 5000MiB at once",
        ),
        pytest.param(
            "azure key",
            "cloud_storage_multipart_threshold_bytes: 4.5GiB\n"
            "cloud_storage_multipart_part_size_bytes: 4.5GiB\n",
            "part_size_bytes: Azure takes at most 4000MiB at once",
            id="parts of azure",
        ),
        ("aws keys", "cloud_storage_multipart_threshold_bytes: 5GiB\n", None),
        (
            "gcs hmac",
            "cloud_storage_sse: kms\ncloud_storage_sse_kms_key_id: k\n",
            "cloud_storage_sse: GCS takes no KMS key with HMAC keys",
        ),
        ("aws keys", "cloud_storage_storage_class: STANDARD_IA\n", None),
        ("aws keys", "cloud_storage_storage_class: GLACIER_IR\n", None),
        ("gcs metadata", "cloud_storage_storage_class: NEARLINE\n", None),
        ("azure key", "cloud_storage_storage_class: Cool\n", None),
        ("aws keys", "cloud_storage_storage_class: DEEP_ARCHIVE\n", "cannot be read until they are restored"),
        ("gcs metadata", "cloud_storage_storage_class: Cool\n", "must be one of STANDARD, NEARLINE"),
        ("azure key", "cloud_storage_storage_class: Archive\n", "must be one of Hot, Cool, Cold"),
        (
            "aws keys",
            "cloud_storage_multipart_part_size_bytes: 5GiB\n",
            "part_size_bytes: must not be more than cloud_storage_multipart_threshold_bytes",
        ),
        ("aws keys", "cloud_storage_multipart_threshold_bytes: 64MiB\n", None),
    ],
)
def test_encryption_class_and_parts_are_what_the_store_takes(name, lines, problem):
    """Settings that a store would refuse with the first upload are refused before the start."""
    if problem is None:
        assert example(name, lines).warnings == ()
        return
    (found,) = faults(EXAMPLES[name] + lines)
    assert problem in found


def test_single_writer_is_off_and_warned_of():
    """A single writer gives up what keeps two daemons apart, so there is always a warning."""
    assert example("aws keys").cloud_storage_single_writer is False
    (warning,) = example("aws keys", "cloud_storage_single_writer: true\n").warnings
    assert "a store that ignores conditional writes is accepted" in warning


@pytest.mark.parametrize("name", EXAMPLES)
def test_secret_of_no_cloud_is_shown(name):
    """A secret is in neither the configuration's text nor its dump."""
    config = example(name)
    assert "s3cr3t" not in f"{config!r} {config} {config.model_dump_json()} {config.model_dump()}"
