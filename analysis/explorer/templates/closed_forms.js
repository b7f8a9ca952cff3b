"use strict";
// Closed forms of detection, the twins of inspector.probability; analysis/explorer/answers.py is what they must equal.
const closedForms = (() => {
  const DAYS_PER_YEAR = 365;
  const CHIPS_PER_INSPECTOR = 1000;
  const SHARE_SLACK = 1e-12;
  const ROUNDING = 1e-9;
  const LARGEST_HIT = 1 - 2 ** -53;
  const MOST_VISITS = 100000;
  const WATTS_PER_CHIP = 1400;
  const IDLE_POWER = 0.1;
  const REFERENCE_MEGAWATTS = 10;
  const STRETCH = 4;
  const OF_A_RUN = ["working", "megawatts", "chip_hours", "found", "hidden", "share", "hit", "caught", "caught_half", "median_day",
    "detection", "excess", "ratio", "posterior", "pass_posterior", "stretch"];
  const HALF_LOG_2PI = 0.91893853320467274178;

  const detection = (logMiss) => 0 - Math.expm1(logMiss);
  const snapshot = (rate, days) => -Math.expm1(-rate * days);
  const chipsNeeded = (at) => at.flop / at.days / (at.flop_per_day * at.utilisation);

  function logAddExp(one, other) {
    const most = Math.max(one, other);
    return most === -Infinity ? most : most + Math.log1p(Math.exp(Math.min(one, other) - most));
  }

  // log(1 - b(1 - e^(-ft))), without loss of digits where a hit is almost certain.
  function logEscape(share, rate, days) {
    const hit = share * snapshot(rate, days);
    return hit < 0.5 ? Math.log1p(-hit) : logAddExp(Math.log1p(-share), Math.log(share) - rate * days);
  }

  // Eq. 1: real chips a period.
  function samplesNeeded(share, at) {
    return Math.log1p(-at.confidence) / logEscape(share, at.rate, at.period) * (at.period / at.days);
  }

  const perYear = (perPeriod, period) => Math.max(Math.ceil(DAYS_PER_YEAR * perPeriod / period), 1);

  // Log of the chance that a run, begun right after a visit, is unseen by a day.
  function logMissByDay(day, share, draws, at) {
    const rest = Math.max(at.days - at.period, 0);
    const full = Math.floor(rest / at.period + ROUNDING);
    let left = Math.max(rest - full * at.period, 0);
    if (left < ROUNDING * at.period) left = 0;
    const seen = Math.floor((day - at.period) / at.period + ROUNDING) + 1;
    const one = (window) => draws * logEscape(share, at.rate, window);
    let total = seen >= 1 ? one(Math.min(at.days, at.period)) : 0;
    const middle = Math.min(Math.max(seen - 1, 0), full);
    if (middle > 0) total += middle * one(at.period);
    return seen >= full + 2 && left > 0 ? total + one(left) : total;
  }

  // Days of the visits that can still see the run.
  function visitDays(at) {
    const number = 1 + Math.ceil(Math.max(0, at.days - at.period) / at.period - ROUNDING);
    return Array.from({length: Math.min(number, MOST_VISITS)}, (_, place) => at.period * (place + 1));
  }

  function medianDay(share, draws, at) {
    const day = visitDays(at).find((each) => detection(logMissByDay(each, share, draws, at)) >= 0.5);
    return day === undefined ? null : day;
  }

  // log(n!) - log of Stirling's formula.
  function stirlingError(n) {
    if (n === 0) return 0;
    if (n <= 15) {
      let log = 0;
      for (let each = 2; each <= n; each++) log += Math.log(each);
      return log - (n + 0.5) * Math.log(n) + n - HALF_LOG_2PI;
    }
    const square = n * n;
    return (1 / 12 - (1 / 360 - (1 / 1260 - (1 / 1680 - 1 / 1188 / square) / square) / square) / square) / n;
  }

  // x log(x/m) + m - x, by a series where both are close.
  function deviance(x, mean) {
    if (Math.abs(x - mean) >= 0.1 * (x + mean)) return x * Math.log(x / mean) + mean - x;
    const ratio = (x - mean) / (x + mean);
    let sum = (x - mean) * ratio;
    let term = 2 * x * ratio;
    for (let place = 1; place < 1000; place++) {
      term *= ratio * ratio;
      const next = sum + term / (2 * place + 1);
      if (next === sum) break;
      sum = next;
    }
    return sum;
  }

  // Log of the binomial probability of k among n, by its deviance from the mean.
  function logBinomial(k, n, chance) {
    if (k === 0) return n * Math.log1p(-chance);
    if (k === n) return n * Math.log(chance);
    const log = stirlingError(n) - stirlingError(k) - stirlingError(n - k)
      - deviance(k, n * chance) - deviance(n - k, n * (1 - chance));
    return log - HALF_LOG_2PI + 0.5 * (Math.log(n) - Math.log(k) - Math.log(n - k));
  }

  // Log P(at most `allowed` of `checks` fail), from the tail that is the smaller one.
  function logTolerated(chance, checks, allowed) {
    if (allowed >= checks || chance === 0) return 0;
    if (chance === 1) return -Infinity;
    const odds = chance / (1 - chance);
    const below = allowed < checks * chance;
    let sum = 1;
    let term = 1;
    if (below) {
      for (let k = allowed; k > 0 && term > sum * 1e-18; k--) sum += term *= k / (checks - k + 1) / odds;
      return logBinomial(allowed, checks, chance) + Math.log(sum);
    }
    for (let k = allowed + 1; k < checks && term > sum * 1e-18; k++) sum += term *= (checks - k) / (k + 1) * odds;
    return Math.log1p(-Math.exp(logBinomial(allowed + 1, checks, chance) + Math.log(sum)));
  }

  const visitsMet = (at) => Math.max(1, at.days / at.period);

  // How often an honest lab is accused over the run's length.
  const falseAlarm = (draws, allowed, at) => detection(visitsMet(at) * logTolerated(at.refusals, draws, allowed));

  function fewestTolerated(draws, at) {
    if (falseAlarm(draws, 0, at) <= at.cap) return 0;
    let low = 0;
    let high = draws;
    while (high - low > 1) {
      const middle = Math.floor((low + high) / 2);
      if (falseAlarm(draws, middle, at) <= at.cap) high = middle;
      else low = middle;
    }
    return high;
  }

  // Least detection, whether chips with evidence are refused or not, with so many refusals tolerated at a visit.
  function detectionTolerating(share, draws, allowed, at) {
    const hit = Math.min(snapshot(at.rate, Math.min(at.days, at.period)), LARGEST_HIT);
    const evident = (1 - at.refusals) * hit * share;
    if (at.refusals === 0 && allowed === 0) return detection(visitsMet(at) * draws * Math.log1p(-hit * share));
    const refusing = logTolerated(Math.min(at.refusals + evident, 1), draws, allowed);
    const shown = logTolerated(Math.min(at.refusals / (1 - evident), 1), draws, allowed)
      + draws * Math.log1p(-evident);
    return detection(visitsMet(at) * Math.max(refusing, shown));
  }

  // p_d(k) of App. C.1, of what a run stretched k times leaves to registered chips; the draws catch it unstretched and whole.
  function stretchDetection(stretch, at) {
    const needed = chipsNeeded(at);
    const declared = Math.min(needed / at.chips, 1 - 1e-9);
    const left = Math.max(0, declared / stretch - at.smuggled / at.chips);
    return 0 - Math.expm1(stretch * Math.log1p(-left) / Math.log1p(-declared) * Math.log1p(-at.confidence));
  }

  // The one site that holds smuggled chips: they do what they can of the run, all others idle, and before the run all do.
  // It is found by the end of the run; the rate grows with the root of its power.
  function hiddenSite(held, at) {
    const working = Math.min(held, Math.ceil(chipsNeeded(at) * (1 - 1e-12)));
    const megawatts = (working + (held - working) * IDLE_POWER) * WATTS_PER_CHIP / 1e6;
    const before = held * IDLE_POWER * WATTS_PER_CHIP / 1e6;
    const rate = (power) => at.finds * Math.sqrt(power / REFERENCE_MEGAWATTS);
    const finds = (rate(before) * at.age + rate(megawatts) * at.days) / DAYS_PER_YEAR;
    return {working, megawatts, chip_hours: working * at.days * 24, found: 0 - Math.expm1(-finds)};
  }

  const finite = (value) => (Number.isFinite(value) ? value : null);

  function likelihood(one, other) {
    return finite(one / other);
  }

  function posterior(prior, one, other) {
    return finite(prior * one / (prior * one + (1 - prior) * other));
  }

  // What the chips that the lab hides leave of the run, and how many chips are drawn.
  function layout(at) {
    const needed = chipsNeeded(at);
    const hidden = Math.min(1, at.smuggled / needed);
    const declared = Math.min(1, needed / at.chips);
    const perPeriod = samplesNeeded(declared, at);
    return {
      needed,
      hidden,
      declared,
      perPeriod,
      share: Math.min(1, needed * (1 - hidden) / at.chips),
      draws: Math.min(Math.max(1, Math.ceil(perPeriod)), at.chips),
      fits: needed <= (at.chips + at.smuggled) * (1 + SHARE_SLACK),
    };
  }

  function answers(at) {
    const {needed, hidden, declared, perPeriod, share, draws, fits} = layout(at);
    const year = perYear(perPeriod, at.period);
    const tolerated = fewestTolerated(draws, at);
    const caught = detectionTolerating(share, draws, tolerated, at);
    const alarm = falseAlarm(draws, tolerated, at);
    return {
      chips_needed: needed,
      fits: fits ? 1 : 0,
      hidden,
      ...hiddenSite(at.smuggled, at),
      share,
      hit: share * snapshot(at.rate, at.period),
      per_period: perPeriod,
      per_year: year,
      inspectors: Math.ceil(year / CHIPS_PER_INSPECTOR),
      draws,
      caught: detection(logMissByDay(Infinity, share, draws, at)),
      caught_half: detection(logMissByDay(at.days / 2, share, draws, at)),
      median_day: medianDay(share, draws, at),
      tolerated,
      detection: caught,
      false_alarm: alarm,
      excess: caught - alarm,
      ratio: likelihood(caught, alarm),
      posterior: posterior(at.prior, caught, alarm),
      pass_posterior: posterior(at.prior, 1 - caught, 1 - alarm),
      stretch: declared >= 1 ? null : stretchDetection(STRETCH, at),
      ...(fits ? {} : Object.fromEntries(OF_A_RUN.map((each) => [each, null]))),
    };
  }

  return {answers, detection, detectionTolerating, falseAlarm, fewestTolerated, hiddenSite, layout, logMissByDay, perYear,
    stretchDetection, visitDays};
})();
