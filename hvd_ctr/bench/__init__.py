"""Measurements behind `hvd-ctr bench`."""
