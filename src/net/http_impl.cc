// The network library's own code, compiled once (see CMakeLists.txt: separate compilation).
#include <boost/asio/impl/src.hpp>
#include <boost/beast/src.hpp>
