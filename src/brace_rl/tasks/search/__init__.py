"""Questions answered by searching: retrieval over a local index or a server, scoring, judges, four task families.

``search_qa`` (real data) and ``search_facts`` (generated) search and answer; ``web_research`` (real data) and
``web_facts`` (generated) also open documents. See ``docs/tasks_search.md``.
"""
