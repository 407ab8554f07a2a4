// Lookup of functions of the driver interface by name.
#pragma once

namespace standin {

// Returns the stand-in's function with this name. If there is none, returns a function that prints the name
// and stops the process.
void* entry_point(const char* name);

int device_attribute(int attribute, int device);

}  // namespace standin
