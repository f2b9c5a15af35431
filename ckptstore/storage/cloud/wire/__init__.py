"""HTTP/1.1 with and without TLS on sockets of our own, for all clouds.

line         bytes to a server and back, in few system calls; TLS by OpenSSL in memory
http_client  requests whose bodies are views of memory
adapter      the same for the sessions of the SDKs of Google and Azure
"""
