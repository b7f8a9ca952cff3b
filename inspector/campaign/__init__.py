"""Campaigns: a fleet of chips, labs that evade, an inspector who samples, and two engines that simulate it.

`load_scenario` reads a TOML file, `Scenario.plan` places a strategy's runs on chips, `predict` gives the closed form
where one exists, and `simulate_agents` and `simulate_counts` play the plan out chip by chip or in aggregate.
"""

from __future__ import annotations

from inspector.campaign.agents import simulate_agents
from inspector.campaign.bands import detection_bands
from inspector.campaign.counts import CountsWorld, TrialResults, simulate_counts
from inspector.campaign.fleet import (
    Evidence,
    Fleet,
    Inspection,
    Kind,
    Lab,
    LogSpan,
    Pool,
    Run,
    Sampling,
    Site,
    Status,
    Threshold,
)
from inspector.campaign.intervals import clopper_pearson, wilson
from inspector.campaign.plan import Plan, honest_plan, make_plan
from inspector.campaign.policies import POLICIES, Behaviour, Policy, Strategy, policy_from
from inspector.campaign.predictions import Prediction, predict
from inspector.campaign.rates import IntervalEnd, MeasuredRate, MissingRate, RateBook, load_rates, save_rates
from inspector.campaign.scenario import Catalogue, Cost, NoScheduleError, Scenario, ScenarioError
from inspector.campaign.scenario_files import load_regimes, load_scenario
from inspector.campaign.sizing import Sizing

__all__ = [
    "POLICIES",
    "Behaviour",
    "Catalogue",
    "Cost",
    "CountsWorld",
    "Evidence",
    "Fleet",
    "Inspection",
    "IntervalEnd",
    "Kind",
    "Lab",
    "LogSpan",
    "MeasuredRate",
    "MissingRate",
    "NoScheduleError",
    "Plan",
    "Policy",
    "Pool",
    "Prediction",
    "RateBook",
    "Run",
    "Sampling",
    "Scenario",
    "ScenarioError",
    "Site",
    "Sizing",
    "Status",
    "Strategy",
    "Threshold",
    "TrialResults",
    "clopper_pearson",
    "detection_bands",
    "honest_plan",
    "load_rates",
    "load_regimes",
    "load_scenario",
    "make_plan",
    "policy_from",
    "predict",
    "save_rates",
    "simulate_agents",
    "simulate_counts",
    "wilson",
]
