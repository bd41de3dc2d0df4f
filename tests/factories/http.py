"""What tests' own HTTP clients have in common: their servers are on this machine, and speak without TLS."""

import ssl

#: For `verify=`. Without it every client loads the certificates of all authorities, which takes 30 ms each time.
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
