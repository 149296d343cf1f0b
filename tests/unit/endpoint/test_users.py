"""Users of an archive endpoint: their logins, and what each may see and read."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import resource
import ssl
import threading
import time
from contextlib import asynccontextmanager

import confluent_kafka
import pytest
from kio.schema.errors import ErrorCode
from structlog.testing import capture_logs

from tests.fakes.gateway_peers import closed
from tests.fakes.log_writer import LogWriter
from tests.support.archive_endpoints import (
    archive_topic,
    endpoint_config,
    fetched,
    listed,
    metadata,
    running_endpoint,
    topic_uuid,
)
from tests.support.certificate import write_certificate
from tests.support.gateway_clients import read_aiokafka, read_librdkafka
from tests.support.kafka_messages import fields_of, request_module
from tests.support.kafka_users import Login, password_of
from tests.support.raw_kafka import connected
from tests.support.tls_relay import trusting
from tieringd.endpoint.access import Access, AccessRule, Operation
from tieringd.endpoint.users_file import ScramCredential, UserDirectory, Users
from tieringd.errors import ConfigError

MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
DENIED = ErrorCode.topic_authorization_failed
CERTIFIED = "User:CN=a server of a test or benchmark"
READ, DESCRIBE = Operation.READ, Operation.DESCRIBE
RULES = (
    AccessRule("User:reader", frozenset({READ}), "orders"),
    AccessRule("User:reader", frozenset({DESCRIBE}), "pub", is_prefix=True),
    AccessRule(CERTIFIED, frozenset({READ}), "*"),
)


@pytest.fixture
def users_file(tmp_path):
    """Give a file with two users, of which one has rules."""
    path = tmp_path / "users.yaml"
    users = Users(rules=RULES)
    for name in ("reader", "stranger"):
        users = users.with_user(name, password_of(name))
    users.write(path)
    return path


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    return write_certificate(tmp_path_factory.mktemp("certificate") / "certificate.pem")


@asynccontextmanager
async def guarded(archive, tmp_path, users_file, **settings):
    """Run an endpoint with users, in plain text."""
    settings = {"users_file": str(users_file)} | settings
    async with running_endpoint(archive, tmp_path / "state", **settings) as endpoint:
        yield endpoint


def with_tls(certificate, **settings):
    return {"tls_cert_file": str(certificate), "tls_key_file": str(certificate), **settings}


async def authenticate(client, mechanism, token):
    """Send a handshake and a token, and return the answer to the token."""
    handshake = request_module(17, 1).SaslHandshakeRequest(mechanism=mechanism)
    assert (await client.ask(handshake)).error_code == ErrorCode.none
    return await client.ask(request_module(36, 2).SaslAuthenticateRequest(auth_bytes=token))


async def log_in(client, user):
    """Log in by PLAIN."""
    found = await authenticate(client, "PLAIN", f"\0{user}\0{password_of(user)}".encode())
    assert found.error_code == ErrorCode.none


PLAIN = {"sasl_plain": "true", "sasl_plain_without_tls": "true"}


@pytest.mark.parametrize("mechanism", MECHANISMS)
async def test_real_clients_log_in_with_every_mechanism(
    archive, writer, tmp_path, *, users_file, certificate, mechanism
):
    """A user with rules reads the whole topic. A wrong password or a user without rules reads nothing."""
    writer.closed_segment()
    await archive_topic(writer, archive)
    settings = with_tls(certificate, sasl_plain="true")
    login = Login("reader", mechanism, certificate)
    async with guarded(archive, tmp_path, users_file, **settings) as endpoint:
        bootstrap = f"127.0.0.1:{endpoint.server.port}"
        assert len(await read_aiokafka(bootstrap, "orders", 3, **login.aiokafka())) == 3
        read = await asyncio.to_thread(read_librdkafka, bootstrap, "orders", 3, **login.librdkafka())
        assert len(read) == 3
        wrong = Login("reader", mechanism, certificate, password="wrong")
        await asyncio.to_thread(until_refused, bootstrap, wrong.librdkafka())
        stranger = Login("stranger", mechanism, certificate)
        codes = await asyncio.to_thread(errors_of_librdkafka, bootstrap, "orders", stranger.librdkafka())
        assert codes == {confluent_kafka.KafkaError.TOPIC_AUTHORIZATION_FAILED}


def until_refused(bootstrap, settings):
    """Return when a consumer of librdkafka was told that it could not log in."""
    errors = []
    settings = {"bootstrap.servers": bootstrap, "group.id": "none", "error_cb": errors.append, **settings}
    consumer = confluent_kafka.Consumer(settings)
    try:
        consumer.subscribe(["orders"])
        deadline = time.monotonic() + 120
        while not any(one.code() == confluent_kafka.KafkaError._AUTHENTICATION for one in errors):
            assert time.monotonic() < deadline, f"librdkafka said only {errors}"
            found = consumer.poll(0.05)
            assert found is None or found.error(), "a record without a login"
    finally:
        consumer.close()


def errors_of_librdkafka(bootstrap, topic, settings):
    """Return the errors that a consumer of librdkafka gets for a topic's metadata."""
    consumer = confluent_kafka.Consumer({"bootstrap.servers": bootstrap, "group.id": "none", **settings})
    try:
        return {consumer.list_topics(topic, timeout=120).topics[topic].error.code()}
    finally:
        consumer.close()


async def test_nothing_is_answered_before_a_login_but_what_leads_to_it(archive, writer, tmp_path, users_file):
    """A client that asks anything else is cut off, and so is one that asks with much."""
    writer.closed_segment()
    await archive_topic(writer, archive)
    async with guarded(archive, tmp_path, users_file) as endpoint:
        async with connected(endpoint.server.port) as client:
            client.send(request_module(3, 12).MetadataRequest(**metadata_fields()))
            assert await closed(client) == b""
        async with connected(endpoint.server.port) as client:
            client.writer.write((1 << 17).to_bytes(4) + bytes([0, 36, 0, 2]) + bytes(100))
            assert await closed(client) == b""


def metadata_fields():
    return fields_of(
        request_module(3, 12).MetadataRequest,
        topics=None,
        allow_auto_topic_creation=False,
        include_topic_authorized_operations=False,
    )


async def test_client_that_does_not_log_in_is_cut_off(archive, tmp_path, users_file):
    """A client that does not log in is cut off, even between the two steps of a login."""
    settings = {"slow_client_timeout_ms": "1s"}
    async with guarded(archive, tmp_path, users_file, **settings) as endpoint:
        async with connected(endpoint.server.port) as client:
            answer = await authenticate(client, "SCRAM-SHA-256", b"n,,n=reader,r=abc")
            assert answer.error_code == ErrorCode.none
            assert await closed(client) == b""
        assert endpoint.server.counters.slow_connections == 1


@pytest.mark.parametrize(
    "token",
    [
        b"",
        b"\0reader\0wrong",
        b"\0nobody\0wrong",
        b"other\0reader\0" + password_of("reader").encode(),
        b"\0\0",
        b"\xff\0\xff\0",
        b"x" * 20_000,
    ],
)
async def test_wrong_token_is_refused_and_the_connection_is_closed(archive, tmp_path, users_file, token):
    """Every refusal is the same, and no token is logged."""
    with capture_logs() as lines:
        async with (
            guarded(archive, tmp_path, users_file, **PLAIN) as endpoint,
            connected(endpoint.server.port) as client,
        ):
            answer = await authenticate(client, "PLAIN", token)
            assert answer.error_code == ErrorCode.sasl_authentication_failed
            assert answer.error_message == "Authentication failed"
            assert await closed(client) == b""
    assert "wrong" not in str(lines)


@pytest.mark.parametrize(
    "final",
    [
        "c=biws,r={nonce},p=" + "A" * 43 + "=",
        "c=biws,r=other,p=" + "A" * 43 + "=",
        "c=biws,r={nonce},p=AA==",
        "c=biws,r={nonce}",
        "p=!",
    ],
)
@pytest.mark.parametrize("user", ["reader", "unknown"])
async def test_wrong_proof_is_refused(archive, tmp_path, users_file, user, final):
    """The first step of an unknown user is as that of a known one, with the same salt in each try."""
    salts = []
    async with guarded(archive, tmp_path, users_file) as endpoint:
        for _ in range(2):
            async with connected(endpoint.server.port) as client:
                answer = await authenticate(client, "SCRAM-SHA-256", f"n,,n={user},r=abc".encode())
                assert answer.error_code == ErrorCode.none
                nonce, salt, _ = answer.auth_bytes.decode().split(",")
                salts.append(salt)
                token = final.format(nonce=nonce[2:]).encode()
                message = request_module(36, 2).SaslAuthenticateRequest(auth_bytes=token)
                assert (await client.ask(message)).error_code == ErrorCode.sasl_authentication_failed
                assert await closed(client) == b""
    assert len(set(salts)) == 1


async def test_unknown_user_looks_like_those_that_exist(tmp_path):
    """An unknown user has the file's iterations and lengths of salt, even if these are not our own."""
    path = tmp_path / "users.yaml"
    imported = ScramCredential.of_password("SCRAM-SHA-256", "p", salt=b"s" * 12, iterations=4096)
    Users({"imported": {"SCRAM-SHA-256": imported}}).write(path)
    users = UserDirectory(path)
    for name in ("unknown", "missing"):
        decoy = users.decoy(name, "SCRAM-SHA-256")
        assert (decoy.iterations, len(decoy.salt)) == (4096, 12)
        assert decoy == users.decoy(name, "SCRAM-SHA-256")
        assert decoy.salt != imported.salt
    assert users.decoy("unknown", "SCRAM-SHA-256").salt != users.decoy("missing", "SCRAM-SHA-256").salt
    assert len(users.decoy("unknown", "SCRAM-SHA-512").salt) == 24


async def test_clients_that_try_passwords_take_few_threads(users_file):
    """The others are there for those that read."""
    at_work, most, lock = 0, 0, threading.Lock()

    class Slow(ScramCredential):
        """Is verified in a time in which others would begin."""

        def has_password(self, password):
            nonlocal at_work, most
            with lock:
                at_work += 1
                most = max(most, at_work)
            time.sleep(0.01)
            with lock:
                at_work -= 1
            return password == "right"

    users = UserDirectory(users_file)
    credential = Slow("SCRAM-SHA-256", 4096, b"s", b"k", b"k")
    tries = [users.has_password(credential, one) for one in ["wrong"] * 20 + ["right"]]
    assert await asyncio.gather(*tries) == [False] * 20 + [True]
    assert most == 2


async def test_second_login_on_one_connection_is_refused(archive, tmp_path, users_file):
    """A client keeps its first user, even if it sends the right password of another one later."""
    async with (
        guarded(archive, tmp_path, users_file, **PLAIN) as endpoint,
        connected(endpoint.server.port) as client,
    ):
        await log_in(client, "reader")
        answer = await client.ask(request_module(17, 1).SaslHandshakeRequest(mechanism="PLAIN"))
        assert answer.error_code == ErrorCode.illegal_sasl_state
        assert await closed(client) == b""


async def test_requests_behind_a_login_wait_for_its_end(archive, tmp_path, users_file):
    """Requests behind a login are answered as the user's, or not at all."""
    await archived_topics(archive, tmp_path)
    handshake = request_module(17, 1).SaslHandshakeRequest(mechanism="PLAIN")
    asked = request_module(3, 12).MetadataRequest(**metadata_fields())
    async with guarded(archive, tmp_path, users_file, **PLAIN) as endpoint:
        for password in (password_of("reader"), "wrong"):
            token = f"\0reader\0{password}".encode()
            authenticate = request_module(36, 2).SaslAuthenticateRequest(auth_bytes=token)
            async with connected(endpoint.server.port) as client:
                for one in (handshake, authenticate, asked):
                    client.send(one)
                assert (await client.answer(handshake)).error_code == ErrorCode.none
                said = (await client.answer(authenticate)).error_code
                if password == "wrong":
                    assert said == ErrorCode.sasl_authentication_failed
                    assert await closed(client) == b""
                else:
                    topics = (await client.answer(asked)).topics
                    assert {one.name for one in topics} == {"orders", "public"}


@pytest.mark.parametrize(
    "first",
    [
        b"p=tls-unique,,n=reader,r=abc",
        b"n,a=stranger,n=reader,r=abc",
        b"n,,n=reader=,r=abc",
        b"n,,n=read=2cer,r=abc",
        b"n,,m=x,n=reader,r=abc",
        b"n,,n=,r=abc",
        b"n,,n=reader,r=",
        b"n,,n=reader,r=" + b"a" * 257,
        b"n,,n=\xff,r=abc",
        b"",
    ],
)
async def test_first_message_of_scram_that_is_not_sound_is_refused(archive, tmp_path, users_file, first):
    """Unsound messages have a channel binding that is not offered, another identity, or bad escapes."""
    async with (
        guarded(archive, tmp_path, users_file) as endpoint,
        connected(endpoint.server.port) as client,
    ):
        answer = await authenticate(client, "SCRAM-SHA-256", first)
        assert answer.error_code == ErrorCode.sasl_authentication_failed
        assert await closed(client) == b""


async def test_final_message_of_scram_counts_once(archive, tmp_path, users_file):
    """A final message counts once, after its own first message and with that one's binding."""
    async with guarded(archive, tmp_path, users_file) as endpoint:
        for header, binding, expected in (
            ("n,,", "n,,", ErrorCode.none),
            ("y,,", "y,,", ErrorCode.none),
            ("n,a=reader,", "n,a=reader,", ErrorCode.none),
            ("y,,", "n,,", ErrorCode.sasl_authentication_failed),
            ("n,,", "p=tls-unique,,", ErrorCode.sasl_authentication_failed),
        ):
            async with connected(endpoint.server.port) as client:
                final = await scram_final(client, header, binding)
                message = request_module(36, 2).SaslAuthenticateRequest(auth_bytes=final)
                assert (await client.ask(message)).error_code == expected
                again = None if expected != ErrorCode.none else await client.ask(message)
                if again is not None:
                    assert again.error_code == ErrorCode.illegal_sasl_state
                assert await closed(client) == b""


async def scram_final(client, header, binding):
    """Begin a login of the reader by SCRAM-SHA-256, and return the message that ends it."""
    bare = "n=reader,r=abc"
    answer = await authenticate(client, "SCRAM-SHA-256", f"{header}{bare}".encode())
    said = answer.auth_bytes.decode()
    nonce, salt, iterations = (part[2:] for part in said.split(",", 2))
    password = password_of("reader").encode()
    salted = hashlib.pbkdf2_hmac("sha256", password, base64.b64decode(salt), int(iterations))
    without_proof = f"c={base64.b64encode(binding.encode()).decode()},r={nonce}"
    client_key = hmac.digest(salted, b"Client Key", "sha256")
    stored_key = hashlib.sha256(client_key).digest()
    signature = hmac.digest(stored_key, f"{bare},{said},{without_proof}".encode(), "sha256")
    proof = bytes(one ^ other for one, other in zip(client_key, signature, strict=True))
    return f"{without_proof},p={base64.b64encode(proof).decode()}".encode()


async def test_plain_is_offered_only_where_it_is_configured(archive, tmp_path, users_file):
    """The answer names what is offered."""
    async with (
        guarded(archive, tmp_path, users_file) as endpoint,
        connected(endpoint.server.port) as client,
    ):
        answer = await client.ask(request_module(17, 1).SaslHandshakeRequest(mechanism="PLAIN"))
        assert answer.error_code == ErrorCode.unsupported_sasl_mechanism
        assert tuple(answer.mechanisms) == MECHANISMS[1:]
        assert await closed(client) == b""


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"sasl_plain": "true"}, "gateway.users_file"),
        ({"sasl_plain": "true", "users_file": "/u"}, "gateway.sasl_plain_without_tls"),
        ({"tls_client_ca_file": "/c"}, "gateway.tls_cert_file"),
    ],
)
def test_configuration_that_would_give_passwords_away_is_refused(tmp_path, settings, said):
    """A configuration that asks for a proof that no client can give is refused as well."""
    with pytest.raises(ConfigError) as error:
        endpoint_config(tmp_path, **settings)
    assert any(said in one for one in error.value.problems)


async def test_address_of_other_hosts_may_be_listened_on_with_users(archive, tmp_path, users_file):
    """Clients of other hosts have to log in."""
    settings = {"host": "0.0.0.0", "advertised": "'archive.example.com:9095'"}
    async with guarded(archive, tmp_path, users_file, **settings):
        pass


async def archived_topics(archive, tmp_path):
    """Archive three topics of three records each, and return their writers."""
    writers = {
        name: LogWriter(tmp_path, name, 0, topic_id=f"{number}".ljust(22, "A"))
        for number, name in enumerate(("orders", "public", "secret"), start=1)
    }
    for writer in writers.values():
        writer.closed_segment()
        await archive_topic(writer, archive)
    return writers


async def epoch_error(client, topic):
    module = request_module(23, 4)
    partition = module.OffsetForLeaderPartition(partition=0, leader_epoch=0)
    asked = module.OffsetForLeaderTopic(topic=topic, partitions=(partition,))
    found = await client.ask(module.OffsetForLeaderEpochRequest(topics=(asked,), replica_id=-1))
    return found.topics[0].partitions[0].error_code


async def config_error(client, kind, name):
    module = request_module(32, 4)
    asked = module.DescribeConfigsResource(resource_type=kind, resource_name=name, configuration_keys=None)
    found = await client.ask(module.DescribeConfigsRequest(resources=(asked,)))
    return found.results[0].error_code


@pytest.mark.parametrize(
    ("user", "readable", "seen"),
    [("reader", {"orders"}, {"orders", "public"}), ("stranger", set(), set())],
)
async def test_topics_that_a_user_may_not_see_are_as_if_there_were_none(
    archive, tmp_path, users_file, *, user, readable, seen
):
    """A topic that a user may not see is refused like a missing one, in every request about topics."""
    writers = await archived_topics(archive, tmp_path)
    async with (
        guarded(archive, tmp_path, users_file, **PLAIN) as endpoint,
        connected(endpoint.server.port) as client,
    ):
        await log_in(client, user)
        every = await metadata(client, everything=True)
        assert {one.name for one in every.topics} == seen
        for name in (*writers, "missing"):
            sees, reads = name in seen, name in readable
            (found,) = (await metadata(client, name)).topics
            assert (found.error_code == DENIED) is not sees
            assert bool(found.partitions) is sees
            assert (await fetched(client, name, 0)).error_code == (ErrorCode.none if reads else DENIED)
            (offset,) = await listed(client, name, -2)
            assert (offset.error_code, offset.offset) == ((ErrorCode.none, 0) if sees else (DENIED, -1))
            assert await epoch_error(client, name) == (ErrorCode.none if sees else DENIED)
            assert await config_error(client, 2, name) == DENIED
            if name == "missing":
                continue
            # Ids are no secret, and what they stand for is.
            identified = topic_uuid(writers[name])
            (found,) = (await metadata(client, identified)).topics
            assert (found.error_code, found.name) == ((ErrorCode.none, name) if sees else (DENIED, None))
            found = await fetched(client, identified, 0, version=17)
            assert found.error_code == (ErrorCode.none if reads else DENIED)
            assert bool(found.records) is reads
        assert await config_error(client, 4, "0") == ErrorCode.cluster_authorization_failed
        log_dirs = await client.ask(request_module(35, 4).DescribeLogDirsRequest(topics=None))
        assert log_dirs.error_code == ErrorCode.cluster_authorization_failed
        module = request_module(75, 0)
        described = await client.ask(
            module.DescribeTopicPartitionsRequest(topics=(), response_partition_limit=100, cursor=None)
        )
        assert {one.name for one in described.topics} == seen


async def test_change_of_the_file_holds_without_a_restart(archive, tmp_path, users_file):
    """Rules for the next request; a user whose password was changed has to log in again."""
    await archived_topics(archive, tmp_path)
    async with (
        guarded(archive, tmp_path, users_file, **PLAIN) as endpoint,
        connected(endpoint.server.port) as client,
    ):
        await log_in(client, "stranger")
        assert (await fetched(client, "orders", 0)).error_code == DENIED
        users = Users.read(users_file)
        rule = AccessRule("User:*", frozenset({READ}), "orders")
        Users(users.credentials, (*users.rules, rule)).write(users_file)
        endpoint.users.renew()
        assert (await fetched(client, "orders", 0)).error_code == ErrorCode.none
        users_file.write_text("users: 7")
        endpoint.users.renew()
        assert (await fetched(client, "orders", 0)).error_code == ErrorCode.none
        users.with_user("stranger", "another").write(users_file)
        endpoint.users.renew()
        client.send(request_module(3, 12).MetadataRequest(**metadata_fields()))
        assert await closed(client) == b""


def test_change_that_could_not_be_read_is_read_later(users_file):
    """A removed user would keep its access, where a moment's lack of descriptors hid the change."""
    users = UserDirectory(users_file)
    Users.read(users_file).without_user("reader").write(users_file)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with capture_logs() as lines:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        try:
            users.renew()
            users.renew()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert users.credential("reader", "SCRAM-SHA-256") is not None
        users.renew()
        assert users.credential("reader", "SCRAM-SHA-256") is None
    assert [line["log_level"] for line in lines] == ["error", "info"]
    assert "Too many open files" in lines[0]["error"]


def test_file_that_is_gone_changes_nothing_and_is_said_once(users_file):
    """A missing file is reported once and changes nothing, even if it comes back as it was."""
    users = UserDirectory(users_file)
    away = users_file.with_suffix(".away")
    users_file.rename(away)
    with capture_logs() as lines:
        users.renew()
        users.renew()
        assert users.credential("reader", "SCRAM-SHA-256") is not None
        away.rename(users_file)
        users.renew()
    assert [line["log_level"] for line in lines] == ["error", "info"]


async def test_client_certificate_is_asked_for_and_names_the_principal(
    archive, tmp_path, users_file, certificate
):
    """A certificate takes the place of a password. A client without one is refused."""
    await archived_topics(archive, tmp_path)
    settings = with_tls(certificate, tls_client_ca_file=str(certificate))
    async with guarded(archive, tmp_path, users_file, **settings) as endpoint:
        known = trusting(certificate)
        known.load_cert_chain(certificate)
        async with connected(endpoint.server.port, tls=known) as client:
            assert (await fetched(client, "secret", 0)).records
        with pytest.raises((ssl.SSLError, ConnectionError, asyncio.IncompleteReadError)):
            async with connected(endpoint.server.port, tls=trusting(certificate)) as client:
                await fetched(client, "secret", 0)


def test_file_that_others_may_read_is_refused(users_file):
    """Passwords can be tried on it."""
    assert users_file.stat().st_mode & 0o777 == 0o600
    users_file.chmod(0o640)
    with pytest.raises(ConfigError, match="others than its owner"):
        Users.read(users_file)


def test_file_is_read_as_it_was_written(users_file):
    """The file has users and rules, and no password."""
    users = Users.read(users_file)
    assert users.rules == RULES
    assert users.credentials["reader"]["SCRAM-SHA-512"].has_password(password_of("reader"))
    assert not users.credentials["reader"]["SCRAM-SHA-256"].has_password(password_of("stranger"))
    assert password_of("reader") not in users_file.read_text()


KEY = "QUE="
OF_A = "users:\n  a: {SCRAM-SHA-256: {iterations: "


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "file: it is empty"),
        (" \n", "file: it is empty"),
        ("7", "file:1: "),
        ("rules: []\n[", "file:2: not valid YAML"),
        ("rules: []\nother: {}", "file:2: the file may have the sections"),
        ("rules: []\nusers: 7", "file:2: users must be"),
        ("users: {}\nrules: {}", "file:2: rules must be"),
        ("users:\n  a: {}", "file:2: user 'a' must have"),
        ("users:\n  a: {MD5: {}}", "file:2: user 'a' must have"),
        (
            f"{OF_A}100, salt: {KEY}, stored_key: {KEY}, server_key: {KEY}}}}}",
            "file:2: user 'a': SCRAM-SHA-256",
        ),
        (f"{OF_A}9000000, salt: {KEY}, stored_key: {KEY}, server_key: {KEY}}}}}", "iterations must be"),
        (f"{OF_A}5000, salt: '!', stored_key: {KEY}, server_key: {KEY}}}}}", "not base64"),
        (f"{OF_A}5000, salt: {KEY}, stored_key: {KEY}, server_key: {KEY}}}}}", "keys of 32 bytes"),
        (f"{OF_A}5000, salt: {KEY}\n", "file:3: not valid YAML"),
        ("users:\n  a: {}\n  a: {}", "file:3: users.a: is set twice"),
        ("users:\n  a,b: {}", "file:2: the user's name 'a,b' must"),
        ("users:\n  'a=b': {}", "file:2: the user's name 'a=b' must"),
        ('users:\n  "a\\nb": {}', "file:2: the user's name 'a\\\\nb' must"),
        ("users:\n  '': {}", "file:2: a user's name must have 1 to"),
        (f"users:\n  {'a' * 121}: {{}}", "file:2: a user's name must have 1 to"),
        ("rules:\n  - {principal: alice, operations: [READ], topic: a}", "file:2: principal must be"),
        ("rules:\n  - {principal: 'User:a', operations: [WRITE], topic: a}", "file:2: operations must"),
        ("rules:\n  - {principal: 'User:a', operations: [{}], topic: a}", "file:2: operations must"),
        ("rules:\n  - {principal: 'User:a', operations: [], topic: a}", "file:2: operations must"),
        ("rules:\n  - {principal: 'User:a', operations: [READ]}", "file:2: a rule must have"),
        ("rules:\n  - {principal: 'User:a', operations: [READ], topic: a, prefix: a}", "file:2: a rule must"),
        ("rules:\n  - {principal: 'User:a', operations: [READ], topic: 7}", "file:2: topic must be"),
    ],
)
def test_faulty_file_is_an_error_with_its_line_that_quotes_no_credential(text, said):
    """A faulty file changes nothing of a running endpoint."""
    with pytest.raises(ConfigError, match=f"{said}") as error:
        Users.parsed(text, source="file")
    assert "QUE" not in str(error.value)


def test_names_in_the_file_are_text_whatever_they_look_like(tmp_path):
    """A user `no` or `123` is that user, also where the file was written by hand."""
    users = Users(rules=(AccessRule("User:no", frozenset({READ}), "null"),))
    for name in ("no", "123", "1.0", "ünï", "~"):
        users = users.with_user(name, "p")
    users.write(tmp_path / "users.yaml")
    assert Users.read(tmp_path / "users.yaml") == users
    text = (tmp_path / "users.yaml").read_text()
    assert Users.parsed(text.replace("'no'", "no").replace("'123'", "123"), source="file") == users


@pytest.mark.parametrize(
    ("rule", "operation", "topic", "allowed"),
    [
        (AccessRule("User:a", frozenset({READ}), "t"), DESCRIBE, "t", True),
        (AccessRule("User:a", frozenset({DESCRIBE}), "t"), READ, "t", False),
        (AccessRule("User:a", frozenset({READ}), "t"), Operation.DESCRIBE_CONFIGS, "t", False),
        (AccessRule("User:a", frozenset({READ}), "t"), READ, "tt", False),
        (AccessRule("User:a", frozenset({READ}), "t", is_prefix=True), READ, "tt", True),
        (AccessRule("User:a", frozenset({READ}), "*"), READ, "any", True),
        (AccessRule("User:a", frozenset({READ}), "*", is_prefix=True), READ, "any", False),
        (AccessRule("User:b", frozenset({READ}), "t"), READ, "t", False),
        (AccessRule("User:*", frozenset({READ}), "t"), READ, "t", True),
    ],
)
def test_rules_allow_as_the_acls_of_kafka_do(rule, operation, topic, allowed):
    """READ includes DESCRIBE, and * is every topic only where it is literal."""
    assert Access.of("User:a", (rule,)).may(operation, topic) is allowed


def test_credential_is_the_one_of_the_standard():
    """The example of RFC 7677."""
    credential = ScramCredential.of_password(
        "SCRAM-SHA-256", "pencil", salt=b"[m\x99h\x9d\x125\x8e\xec\xa0K\x14\x126\xfa\x81", iterations=4096
    )
    message = (
        b"n=user,r=rOprNGfwEbeRWgbNEkqO,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,"
        b"s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096,c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
    )
    # The proof and the server's signature in the example.
    proof = base64.b64decode("dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=")
    assert credential.has_proof(proof, message)
    signature = base64.b64encode(credential.signature(message))
    assert signature == b"6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="
