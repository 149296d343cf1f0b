"""The errors that calls of Spark raise on the driver. This module imports PySpark, which is optional."""

from __future__ import annotations

from typing import Final

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

SPARK_ERRORS: Final = (Py4JError, PySparkException, ConnectionError)
"""Py4J raises ConnectionError when the JVM has ended. A started Spark turns errors into PySparkException."""
