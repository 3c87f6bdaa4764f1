"""Issues of real repositories, to be resolved by a patch: SWE-bench Pro, and any commit with a fix."""
