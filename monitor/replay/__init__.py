"""Programs run again from committed evidence: a step, a segment, the moment of a lie, a traced step."""
