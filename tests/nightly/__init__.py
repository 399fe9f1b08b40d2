"""Tests and measurements that take minutes or depend on the machine: `.ci/nightly`."""
