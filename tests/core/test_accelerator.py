"""Functions with an accelerator state what times on it are estimated from."""

import pytest

from funcpipe.core import FunctionSize
from funcpipe.core.accelerator import Accelerator
from funcpipe.errors import InvalidValue


@pytest.mark.parametrize("field", ["fp32_tflop_s", "memory_gb_s", "host_device_gb_s"])
def test_a_function_states_the_rates_of_its_accelerator(field: str) -> None:
    rates = {"fp32_tflop_s": 30.0, "memory_gb_s": 300.0, "host_device_gb_s": 12.0}
    del rates[field]
    device = Accelerator(name="L4", memory_mb=24_000, vcpu_equivalents=60.0, **rates)
    with pytest.raises(InvalidValue, match=f"accelerator.{field}"):
        FunctionSize(
            name="L4",
            memory_mb=16_384,
            vcpu=4.0,
            upload_bytes_s=1e8,
            download_bytes_s=1e8,
            price_usd_s=3e-4,
            accelerator=device,
        )
