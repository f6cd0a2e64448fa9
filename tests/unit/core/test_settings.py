"""The settings of a deployment: what is wrong is refused by its name, before anything is started with it."""

from __future__ import annotations

import pytest

from millrace.errors import ConfigError
from millrace.settings import Settings


@pytest.mark.parametrize("memory", ["3g", "1500m", "12G"])
def test_a_drivers_memory_is_taken_as_it_is_written(memory: str) -> None:
    assert Settings.from_env({"MILLRACE_SPARK_DRIVER_MEMORY": memory}).spark_driver_memory == memory


def test_a_drivers_memory_that_is_not_set_or_empty_has_a_default() -> None:
    assert (
        Settings.from_env({}).spark_driver_memory
        == Settings.from_env({"MILLRACE_SPARK_DRIVER_MEMORY": ""}).spark_driver_memory
        == "3g"
    )


@pytest.mark.parametrize("memory", ["3", "3gb", "0g", "1.5g", "-2g", "3g --conf a=b"])
def test_a_drivers_memory_that_the_jvm_would_not_take_is_refused(memory: str) -> None:
    with pytest.raises(ConfigError, match=r"MILLRACE_SPARK_DRIVER_MEMORY.*e\.g\. 1500m or 3g"):
        Settings.from_env({"MILLRACE_SPARK_DRIVER_MEMORY": memory})
