"""A valid configuration text, and what is wrong with others."""

from __future__ import annotations

import pytest

from tieringd.config import Config, parse_config
from tieringd.errors import ConfigError

SMALLEST = """\
broker:
  kind: none
  log_dirs: [/srv/logs]
state_directory: /srv/state
"""
"""Four lines; what a test adds begins in line 5."""
TIERED = (
    SMALLEST
    + """\
cloud_storage_enabled: true
cloud_storage_enable_remote_write: true
cloud_storage_backend: file
cloud_storage_file_root: /srv/archive
"""
)
"""Eight lines."""

ON = SMALLEST + "cloud_storage_enabled: true\ncloud_storage_enable_remote_write: true\n"
"""Six lines."""
EXAMPLES = {
    "aws keys": """\
cloud_storage_access_key: AKIAEXAMPLE
cloud_storage_secret_key: ${SECRET}
cloud_storage_region: us-west-2
cloud_storage_bucket: archive-of-aws
""",
    "aws role": """\
cloud_storage_credentials_source: aws_instance_metadata
cloud_storage_region: us-west-2
cloud_storage_bucket: archive-of-aws
""",
    "aws web identity": """\
cloud_storage_credentials_source: sts
cloud_storage_region: us-west-2
cloud_storage_bucket: archive-of-aws
""",
    "gcs hmac": """\
cloud_storage_access_key: GOOGEXAMPLE
cloud_storage_secret_key: ${SECRET}
cloud_storage_api_endpoint: storage.googleapis.com
cloud_storage_region: us-west1
cloud_storage_bucket: archive-of-gcs
""",
    "gcs metadata": """\
cloud_storage_api_endpoint: storage.googleapis.com
cloud_storage_credentials_source: gcp_instance_metadata
cloud_storage_region: us-west1
cloud_storage_bucket: archive-of-gcs
""",
    "gcs service account": """\
cloud_storage_gcs_credentials_file: /etc/tieringd/account.json
cloud_storage_region: us-west1
cloud_storage_bucket: archive-of-gcs
""",
    "azure key": """\
cloud_storage_azure_shared_key: ${SECRET}
cloud_storage_azure_storage_account: archiveaccount
cloud_storage_azure_container: archive
""",
    "azure identity": """\
cloud_storage_credentials_source: azure_vm_instance_metadata
cloud_storage_azure_managed_identity_id: 2d1ab9c0-0000-4000-8000-000000000000
cloud_storage_azure_storage_account: archiveaccount
cloud_storage_azure_container: archive
""",
    "azure workload identity": """\
cloud_storage_credentials_source: azure_aks_oidc_federation
cloud_storage_azure_storage_account: archiveaccount
cloud_storage_azure_container: archive
""",
    "azure hierarchical": """\
cloud_storage_azure_shared_key: ${SECRET}
cloud_storage_azure_storage_account: archiveaccount
cloud_storage_azure_container: archive
cloud_storage_azure_adls_endpoint: adls.example.com
cloud_storage_azure_adls_port: 8443
""",
}
"""What the documents write for each cloud and each way in; it follows on `ON`."""


def parsed(text: str, **environ: str) -> Config:
    return parse_config(text, source="t.yaml", environ=environ)


def problems_of(text: str, **environ: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parsed(text, **environ)
    return list(caught.value.problems)
