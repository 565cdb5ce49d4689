"""The part of the package that a compiler makes; without one, the package works without it, more slowly."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "funcpipe.comm.block_int8_kernel",
            ["funcpipe/comm/block_int8_kernel.c"],
            extra_compile_args=["-O3", "-ffp-contract=off", "-fno-trapping-math"],
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
