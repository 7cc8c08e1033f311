from pdproxy.connectors.base import Connector
from pdproxy.connectors.registry import CONNECTORS


def test_each_connector_has_the_name_it_is_found_by():
    made: dict[str, Connector] = {name: make() for name, make in CONNECTORS.items()}

    assert {name: connector.name for name, connector in made.items()} == {"pull": "pull"}
