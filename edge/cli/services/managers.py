"""The program that starts services, by its name."""

from __future__ import annotations

from collections.abc import Mapping

from edge.cli.services.launchd import Launchd
from edge.cli.services.service import ServiceManager
from edge.cli.services.systemd import Systemd
from edge.cli.services.task_scheduler import TaskScheduler
from edge.system.kind import usual_service_manager

MANAGERS: Mapping[str, ServiceManager] = {
    "systemd": Systemd(),
    "launchd": Launchd(),
    "task-scheduler": TaskScheduler(),
}


def own_manager() -> ServiceManager:
    """That of this system."""
    return MANAGERS[usual_service_manager()]
