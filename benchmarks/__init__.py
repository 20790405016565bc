"""Side-by-side measurements. `python -m benchmarks NAME [--rounds N] [--json FILE]`."""
