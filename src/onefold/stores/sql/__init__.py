"""Share one SQL store between all databases: records, statements, connections, pools and joined transactions."""
