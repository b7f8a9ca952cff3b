"""Closed forms of detection: samples, schedules, timing, sites, alarms and plans after Shavit 2023, section 5."""
