import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse.BodyHandlers;

/** Gets a page COUNT times with java.net.http: java HttpGet.java URL COUNT. Prints requests, failures and seconds, without a first tenth. */
public class HttpGet {
    public static void main(String[] arguments) throws Exception {
        int count = Integer.parseInt(arguments[1]);
        HttpClient client = HttpClient.newHttpClient();
        HttpRequest request = HttpRequest.newBuilder(URI.create(arguments[0])).version(HttpClient.Version.HTTP_1_1).build();
        long began = 0;
        int failed = 0;
        for (int number = -(count / 10); number < count; number++) {
            if (number == 0) {
                began = System.nanoTime();
                failed = 0;
            }
            try {
                client.send(request, BodyHandlers.discarding());
            } catch (java.io.IOException error) {
                failed++;
            }
        }
        System.out.println(count + " " + failed + " " + (System.nanoTime() - began) / 1e9);
        System.exit(0);
    }
}
