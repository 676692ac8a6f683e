"""The vocabulary that every part shares: data only, no computation beyond look-up and checks."""

from autopiper.plan.actions import Action, Place, Program, Wait
from autopiper.plan.costs import BlockCost, CostTable, LinkCost, PriceIndex
from autopiper.plan.plan import Alternative, Plan, Provenance, Trial, load_plan
from autopiper.plan.space import Space
from autopiper.plan.strategy import Group, Pipeline, Schedule, Stage, Strategy
from autopiper.plan.timeline import Event, Lane, MemoryPoint, RankTime, Timeline
from autopiper.plan.training import Training

__all__ = [
    "Action", "Alternative", "BlockCost", "CostTable", "Event", "Group", "Lane", "LinkCost", "MemoryPoint",
    "Pipeline", "Place", "Plan", "PriceIndex", "Program", "Provenance", "RankTime", "Schedule", "Space", "Stage",
    "Strategy", "Timeline", "Training", "Trial", "Wait", "load_plan",
]  # fmt: skip
