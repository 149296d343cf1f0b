"""The accounts of the chunk cache, while a comparison with the disk goes on."""

from __future__ import annotations

from threading import Thread

from tieringd.cache.accounts import Accounts


def name(number: int) -> str:
    return f"{number:08x}/cluster/orders/0_{'A' * 22}/{number}-{number}-100-5-{'ab' * 8}.log_chunks/0"


def test_readers_use_the_accounts_while_the_disk_is_compared():
    """The event loop serves chunks meanwhile, so a comparison does not hold it up until its end."""
    accounts = Accounts(buckets=0)
    counts = []

    def found():
        for number in range(1000):
            if number % 500 == 499:
                # A thread of its own: with the lock held it would wait for ever.
                reader = Thread(target=lambda: counts.append(accounts.use().objects), daemon=True)
                reader.start()
                reader.join(60)
            yield name(number), 100, 1

    accounts.compare(accounts.begin_comparison(), found(), {})
    assert len(counts) == 2
    assert counts[0] < counts[1] < 1000 == accounts.use().objects


def test_file_that_is_written_during_a_comparison_stays():
    """The listing does not have it, and neither does it have the files that are gone."""
    accounts = Accounts(buckets=0)
    for number in range(3):
        accounts.add(name(number), 100, accessed_ms=1)
    comparison = accounts.begin_comparison()

    def found():
        yield name(0), 100, 1
        accounts.add(name(7), 100, accessed_ms=1)

    accounts.compare(comparison, found(), {})
    assert {one.name for one in accounts.files()} == {name(0), name(7)}
    assert accounts.use().size_bytes == 200
