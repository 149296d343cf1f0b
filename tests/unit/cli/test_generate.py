"""`tieringd generate`: files for the systems that watch tieringd, and for Kubernetes."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.unit.cli.commands import invoked
from tieringd.cli.generate import RUNBOOK
from tieringd.errors import ConfigError

ROOT = Path(__file__).parents[3]


def printed(*arguments: str) -> str:
    done = invoked("generate", *arguments)
    assert done.exit_code == 0, done.errors
    return done.output


def test_rules_are_those_of_the_repository():
    """The command prints the file that its tests try."""
    assert printed("prometheus-rules") == (ROOT / "deploy" / "prometheus" / "alerts.yml").read_text()


def test_rules_lead_to_the_runbook_that_is_named():
    """Every link is to a section of the address that is given."""
    (group,) = yaml.safe_load(printed("prometheus-rules", "--runbook", "https://wiki/runbook"))["groups"]
    links = {rule["alert"]: rule["annotations"]["runbook_url"] for rule in group["rules"]}
    assert links == {name: f"https://wiki/runbook#{name.lower()}" for name in links}


def test_rules_are_a_resource_of_the_prometheus_operator_where_asked_for():
    """The same groups, under the resource's spec."""
    resource = yaml.safe_load(printed("prometheus-rules", "--as-resource"))
    assert (resource["kind"], resource["metadata"]["name"]) == ("PrometheusRule", "tieringd")
    assert resource["spec"] == yaml.safe_load(printed("prometheus-rules"))


def test_scrape_configuration_names_the_job_and_the_targets():
    """The job's name is the one that the rules ask for, and each target is there once."""
    (job,) = yaml.safe_load(printed("scrape-config", "--target", "a:1", "--target", "b:2"))["scrape_configs"]
    assert job["job_name"] == "tieringd"
    assert job["static_configs"] == [{"targets": ["a:1", "b:2"]}]
    (job,) = yaml.safe_load(printed("scrape-config"))["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["localhost:9640"]}]


@pytest.mark.parametrize("target", ["[::1]:9640", "it's: here", "a #b", "yes"])
def test_scrape_configuration_keeps_a_target_as_it_is(target):
    """What YAML would take for a list, a mapping or a comment is quoted: an address of IPv6 is one."""
    (job,) = yaml.safe_load(printed("scrape-config", "--target", target))["scrape_configs"]
    assert job["static_configs"] == [{"targets": [target]}]


def test_scrape_configuration_has_the_partitions_where_asked_for():
    """A job of its own, less often and with a cap, for the same targets."""
    jobs = yaml.safe_load(printed("scrape-config", "--partitions", "--target", "a:1"))["scrape_configs"]
    assert [job["job_name"] for job in jobs] == ["tieringd", "tieringd-partitions"]
    assert jobs[1]["metrics_path"] == "/metrics/partitions"
    assert jobs[1]["sample_limit"] == 100_000
    assert [job["static_configs"] for job in jobs] == [[{"targets": ["a:1"]}]] * 2


def test_dashboards_are_those_of_the_repository():
    """Each dashboard is printed as it is in the repository. An unknown one is an error with their names."""
    directory = ROOT / "deploy" / "grafana"
    names = printed("grafana-dashboard").split()
    assert names == sorted(path.stem for path in directory.glob("*.json"))
    for name in names:
        assert printed("grafana-dashboard", name) == (directory / f"{name}.json").read_text()
    with pytest.raises(ConfigError, match="there is no dashboard none") as refused:
        printed("grafana-dashboard", "none")
    assert "overview" in str(refused.value)


def files_below(directory):
    return {path.relative_to(directory) for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("overlay", "built_on"),
    [("statefulset", {"common", "sidecar"}), ("strimzi", {"common"}), ("redpanda", {"common"})],
)
def test_manifests_for_kubernetes_are_those_of_the_repository(tmp_path, overlay, built_on):
    """An overlay comes with what it is built on, and with nothing else."""
    directory, shipped = tmp_path / "k8s", ROOT / "deploy" / "kubernetes"
    dry = printed("kubernetes", overlay, "--directory", str(directory), "--dry-run")
    assert not directory.exists()
    assert printed("kubernetes", overlay, "--directory", str(directory)) == dry
    found = files_below(directory)
    assert found == {one for one in files_below(shipped) if one.parts[0] in built_on | {overlay}}
    assert sorted(dry.split()) == sorted(str(directory / one) for one in found)
    for one in found:
        assert (directory / one).read_text() == (shipped / one).read_text()
    assert not printed("kubernetes", overlay, "--directory", str(directory)), "all is there"


def test_manifests_for_kubernetes_name_the_image_and_replace_no_file(tmp_path):
    """A second run would take back what the operator has changed."""
    arguments = ("kubernetes", "redpanda", "--directory", str(tmp_path), "--image", "here/tieringd")
    printed(*arguments)
    values = tmp_path / "redpanda" / "values.yaml"
    assert "image: here/tieringd:0.1.0" in values.read_text()
    values.write_text("mine")
    (tmp_path / "common" / "podmonitor.yaml").unlink()
    with pytest.raises(ConfigError, match="exists already with other content, and nothing was written"):
        printed(*arguments)
    assert values.read_text() == "mine"
    assert not (tmp_path / "common" / "podmonitor.yaml").exists()


@pytest.mark.parametrize(
    ("image", "is_taken"),
    [
        ("tieringd", True),
        ("localhost:5000/team/tieringd_2", True),
        ("registry.example.com/tieringd:1.2", False),
        ("here/tieringd@sha256:0f", False),
        ("here/tieringd:", False),
        ("", False),
        ("a\nb", False),
    ],
)
def test_manifests_for_kubernetes_take_an_image_without_a_tag(tmp_path, image, is_taken):
    """The tag is this release's: with another one behind it, no kubelet could pull the image."""
    arguments = ("kubernetes", "redpanda", "--directory", str(tmp_path / "k8s"), "--image", image)
    done = invoked("generate", *arguments)
    assert (tmp_path / "k8s").exists() is is_taken
    if is_taken:
        assert f"image: {image}:0.1.0\n" in (tmp_path / "k8s" / "redpanda" / "values.yaml").read_text()
    else:
        assert done.exit_code == 2
        assert "without a tag" in done.errors


def test_ways_to_run_on_kubernetes_are_listed(tmp_path):
    """Each is a directory of the repository; another is an error with their names."""
    assert printed("kubernetes").split() == ["redpanda", "statefulset", "strimzi"]
    with pytest.raises(ConfigError, match="there is no overlay none") as refused:
        printed("kubernetes", "none")
    assert "statefulset" in str(refused.value)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        printed("kubernetes", "redpanda", "--directory", str(tmp_path / "file"))


def test_pages_are_those_of_the_repository_and_alerts_link_to_them(tmp_path):
    """A page is printed, or all are written over those of an older release, where the alerts' links lead."""
    pages = {one.name: one.read_text() for one in (ROOT / "docs").glob("*.md")}
    assert printed("docs").split() == sorted(one.removesuffix(".md") for one in pages)
    assert printed("docs", "runbook") == pages["runbook.md"]
    directory = tmp_path / "doc"
    dry = printed("docs", "--directory", str(directory), "--dry-run")
    assert not directory.exists()
    directory.mkdir()
    (directory / "runbook.md").write_text("of an older release")
    assert printed("docs", "--directory", str(directory)) == dry
    assert {one.name: one.read_text() for one in directory.iterdir()} == pages
    assert RUNBOOK.removeprefix("file://") == "/usr/share/doc/tieringd/runbook.md"
    (line,) = re.findall(
        "^tieringd generate docs .*$", (ROOT / "docs/install_systemd.md").read_text(), re.MULTILINE
    )
    assert line.split()[-1] == "/usr/share/doc/tieringd"
    with pytest.raises(ConfigError, match="there is no page none"):
        printed("docs", "none")
    with pytest.raises(ConfigError, match="cannot be written"):
        printed("docs", "--directory", str(directory / "runbook.md"))


@pytest.mark.parametrize("kind", ["deploy/grafana", "deploy/kubernetes", "deploy/prometheus", "docs"])
def test_files_are_in_the_package(kind):
    """An installed package has the files where the command looks for them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    included = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert included[kind] == f"tieringd/deploy/{kind.removeprefix('deploy/')}"
