"""What calls of Spark raise on the driver. Only for code that has made sure of Spark: it imports PySpark."""

from __future__ import annotations

from typing import Final

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

SPARK_ERRORS: Final = (Py4JError, PySparkException, ConnectionError)
"""The last is of Py4J, where the JVM has ended. Spark turns its own into the second once it has begun."""
