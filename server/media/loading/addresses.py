"""The addresses to which the server may connect on behalf of a client: those of the public internet."""

from __future__ import annotations

import ipaddress

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_NAT64 = ipaddress.ip_network("64:ff9b::/96")  # the well-known prefix, behind which IPv4 addresses lie
_NOT_PUBLIC = [ipaddress.ip_network("192.0.0.0/24")]  # which older Pythons consider global


def is_public(text: str) -> bool:
    """Return whether `text`, an address as the resolver returns it, is of the public internet, along with every IPv4
    address embedded in it.
    """
    try:
        address = ipaddress.ip_address(text)  # with a zone ("fe80::1%eth0") it is never global
    except ValueError:
        return False
    if address in _NAT64:
        return _is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return all(_is_public(one) for one in (address, *_embedded(address)))


def _is_public(address: Address) -> bool:
    return address.is_global and not (
        address.is_multicast
        or address.is_reserved
        or address.is_private
        or address.is_loopback
        or address.is_link_local
        or address.is_unspecified
        or any(address in network for network in _NOT_PUBLIC)
    )


def _embedded(address: Address) -> list[ipaddress.IPv4Address]:
    """Return the IPv4 addresses to which packets for an IPv6 address may go: mapped, 6to4, Teredo."""
    if isinstance(address, ipaddress.IPv4Address):
        return []
    found = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    return [one for one in found if one is not None]
