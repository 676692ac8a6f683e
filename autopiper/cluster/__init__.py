"""Clusters as data: nodes of devices, links between them, the device catalogue."""

from autopiper.cluster.spec import Cluster, Device, DeviceType, Link, Node, Tier

__all__ = ["Cluster", "Device", "DeviceType", "Link", "Node", "Tier"]
