"""The manual that ``chipwitness docs`` writes: tutorial, commands, scenario reference, glossary and API pages."""
