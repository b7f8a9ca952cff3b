"""The manual: pages for each reader, which ``chipwitness docs`` writes with commands, scenario files and API pages."""
