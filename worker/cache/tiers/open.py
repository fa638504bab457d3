"""The kinds of tiers, and those that the settings ask for. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.configs.config import Config
from quire.worker.cache.tiers.base import Agree, Rank, Tier, alone
from quire.worker.cache.tiers.disk import DiskTier
from quire.worker.cache.tiers.ram import RamTier
from quire.worker.cache.tiers.remote import RemoteTier
from quire.worker.cache.tiers.slots import SlotTier
from quire.worker.messages import TierInfo

if TYPE_CHECKING:
    from quire.worker.platforms.base import Platform

TIERS: list[type[Tier]] = [RamTier, DiskTier, SlotTier, RemoteTier]  # blocks that one evicts are offered to the next


def plan_tiers(config: Config, platform: Platform, agree: Agree = alone) -> list[TierInfo]:
    """Return the tiers that the settings ask for, with the bytes of all ranks of an engine, which call this together.
    Raises ValueError for settings that cannot be followed.
    """
    if not config.cache.enable_prefix_caching:
        return []
    asked = [kind.plan(config, platform) for kind in TIERS]
    limits = agree([-1 if limit is None else limit for limit in asked])
    return [TierInfo(kind.name, kind.medium, kind.where, n, kind.saves) for kind, n in zip(TIERS, limits) if n >= 0]


def ram_bytes(tiers: list[TierInfo]) -> int:
    """Return the RAM that the tiers of all ranks may take."""
    return sum(tier.limit for tier in tiers if tier.medium == RamTier.medium or tier.name == RemoteTier.name)


def open_tiers(tiers: list[TierInfo], rank: Rank) -> list[Tier]:
    """Open the tiers of a rank. Raises ValueError if that is not possible."""
    kinds = {kind.name: kind for kind in TIERS}
    return [kinds[tier.name].open(tier.limit, rank) for tier in tiers]
