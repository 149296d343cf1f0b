"""tieringd: tiered storage beside a Kafka-API broker, without changing the broker."""

import sys

__version__ = "0.1.0"

if sys.version_info < (3, 11, 3):
    from tieringd.timeouts import mend_timeouts

    mend_timeouts()
